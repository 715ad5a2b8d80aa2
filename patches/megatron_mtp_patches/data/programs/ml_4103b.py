"""A pack of two sequences of 8 tokens (--sft) on two tensor-parallel ranks of the second of three pipeline stages:
where the sequences end, as each rank is told.
"""

from ...defects.labs.packing_lab import ends_of_batch

RANKS = 2
NEEDS = ("megatron.training",)


def reproduce():
    return ends_of_batch(stages=3, stage=1)
