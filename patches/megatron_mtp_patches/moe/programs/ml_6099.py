"""The gradient norm, as dist_muon has it, of the biases of two experts, one on each of two tensor-parallel ranks, where
each of their gradients is 1.
"""

from ...defects.labs.lab import norm_of_expert_gradients

RANKS = 2
NEEDS = ("transformer-engine", "Muon")


def reproduce():
    return norm_of_expert_gradients("bias", optimizer="dist_muon")
