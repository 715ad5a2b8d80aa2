"""The gradient norm of a GPT under DDP, and under Megatron-FSDP on one data-parallel rank."""

from ...defects.labs.fsdp_lab import norms_of_a_step

NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_a_step("optim_grads")
