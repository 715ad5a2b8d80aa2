"""A pack of two sequences of 8 tokens (--sft) on two tensor-parallel ranks: where the sequences end, as each rank is
told.
"""

from ...defects.labs.packing_lab import ENDS, ends_of_batch

RANKS = 2
NEEDS = ("megatron.training",)
EXPECTED = [ENDS, ENDS]
LIMIT = 5.0  # seconds; the ranks wait for each other, or fail


def reproduce():
    return ends_of_batch(stages=1, stage=0)
