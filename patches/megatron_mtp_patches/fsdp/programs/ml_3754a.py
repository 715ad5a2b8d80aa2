"""The gradient norm under Megatron-FSDP with no_shard on two data-parallel ranks, where each gradient is 1."""

from ...defects.labs.fsdp_lab import norm_without_sharding

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norm_without_sharding()
