"""The gradient norm of experts under DDP, and under Megatron-FSDP on two ranks that have one of two experts each.
A step has two microbatches.
"""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step("optim_grads_params", 2, ".experts.", is_fused=True, expert_ranks=2)
