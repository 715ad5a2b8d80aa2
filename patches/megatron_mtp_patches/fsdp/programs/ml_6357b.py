"""The gradient norm of a GPT over two microbatches under DDP, and under Megatron-FSDP with optim, without overlap of
the reduction, by a schedule that has Megatron-FSDP's no_sync().
"""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_a_step("optim", 2, sharding={"overlap_grad_reduce": False})
