"""The gradient norm of a GPT under DDP, and under Megatron-FSDP on one data-parallel rank that reduces in float64."""

from ...defects.labs.fsdp_lab import norms_of_a_step

NEEDS = ("transformer-engine",)


def reproduce():
    import torch

    return norms_of_a_step("optim_grads", sharding={"megatron_fsdp_grad_comm_dtype": torch.float64})
