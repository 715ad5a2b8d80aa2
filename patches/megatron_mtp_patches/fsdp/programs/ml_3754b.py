"""The gradient norm of a GPT under DDP, and under Megatron-FSDP with no_shard without overlap of the reduction."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_a_step("no_shard", has_no_sync=False, sharding={"overlap_grad_reduce": False})
