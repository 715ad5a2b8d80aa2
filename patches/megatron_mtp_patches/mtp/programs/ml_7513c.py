"""The mean loss of an MTP head, as its gradient has it, with --context-parallel-size 2: one rank has 7 of its tokens
with the loss 10, the other 8 with the loss 2.
"""

from ...defects.labs.lab import mtp_loss_of_cut_sequence

RANKS = 2


def reproduce():
    mean, total = mtp_loss_of_cut_sequence(masked=0)
    return mean, total / RANKS
