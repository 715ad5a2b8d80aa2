"""The z loss in the log of two data-parallel ranks. It is to be the mean of both."""

from ...defects.labs.lab import start
from ...defects.labs.moe_lab import logged_z_loss

RANKS = 2


def reproduce():
    start()
    return logged_z_loss()
