"""The gradient norm of a GPT, and under Megatron-FSDP with two optimizer instances of two ranks, which share out the
optimizer state. All ranks have the same data.
"""

from ...defects.labs.fsdp_lab import norms_over_instances

RANKS = 4
NEEDS = ("einops",)


def reproduce():
    return norms_over_instances("optim")
