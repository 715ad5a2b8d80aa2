"""The gradient norm, as dist_muon has it, of two experts, each of which both tensor-parallel ranks have, where each of
their gradients is 1.
"""

from ...defects.labs.lab import norm_of_expert_gradients

RANKS = 2
NEEDS = ("transformer-engine", "Muon")


def reproduce():
    return norm_of_expert_gradients("weight", optimizer="dist_muon", expert_parallel=1)
