"""The gradient norm under Megatron-FSDP with no_shard and two experts, which all of two tensor-parallel times two
data-parallel ranks have, where each gradient is 1.
"""

from ...defects.labs.fsdp_lab import norm_without_sharding

RANKS = 4
NEEDS = ("transformer-engine",)


def reproduce():
    return norm_without_sharding(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
