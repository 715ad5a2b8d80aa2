"""The gradient norm of two experts, one on each of two tensor-parallel ranks, where each of their gradients is 1."""

from ...defects.labs.lab import norm_of_expert_gradients

RANKS = 2
NEEDS = ("transformer-engine>=2.13",)


def reproduce():
    return norm_of_expert_gradients("weight", add_bias_linear=False)
