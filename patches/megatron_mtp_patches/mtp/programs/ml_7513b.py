"""The mean loss of an MTP head, as its gradient has it, with --context-parallel-size 2 where the loss mask has the
second half of a sequence: one rank has 3 of its tokens with the loss 10, the other 5 with the loss 2.
"""

from ...defects.labs.lab import mtp_loss_of_cut_sequence

RANKS = 2


def reproduce():
    mean, total = mtp_loss_of_cut_sequence()
    return mean, total / RANKS
