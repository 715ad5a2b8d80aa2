"""The gradient norm of a GPT on two ranks under DDP, and under Megatron-FSDP with optim."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_a_step("optim")
