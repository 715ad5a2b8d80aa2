"""The z loss in the log of two tensor-parallel ranks that share a sequence. It is to be the mean of both parts."""

from ...defects.labs.lab import start
from ...defects.labs.moe_lab import logged_z_loss

RANKS = 2


def reproduce():
    start(tensor_model_parallel_size=2)
    return logged_z_loss(tensor_model_parallel_size=2, sequence_parallel=True)
