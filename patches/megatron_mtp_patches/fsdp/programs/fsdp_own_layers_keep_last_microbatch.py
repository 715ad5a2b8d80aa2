"""The gradient norm of a GPT's output layer over two microbatches under DDP, and under Megatron-FSDP with no_shard."""

from ...defects.labs.fsdp_lab import norms_of_a_step

NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step("no_shard", 2, "output_layer", is_fused=True)
