"""The gradient norm of the biases of two experts, one on each of two tensor-parallel ranks, where each gradient of them
is 1.
"""

from ...defects.labs.lab import norm_of_expert_gradients

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norm_of_expert_gradients("bias")
