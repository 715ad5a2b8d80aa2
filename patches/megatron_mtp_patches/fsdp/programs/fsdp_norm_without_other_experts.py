"""The gradient norm under Megatron-FSDP with no_shard and two experts, one on each of two ranks, where each gradient
is 1.
"""

from ...defects.labs.fsdp_lab import norm_without_sharding

RANKS = 2
NEEDS = ("einops",)


def reproduce():
    return norm_without_sharding(expert_model_parallel_size=2)
