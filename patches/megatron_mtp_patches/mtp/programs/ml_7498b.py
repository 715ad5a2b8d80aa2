"""The mean loss of an MTP head, as its gradient has it, with --calculate-per-token-loss and --context-parallel-size 2:
one rank has 7 of its tokens with the loss 10, the other 8 with the loss 2.
"""

from ...defects.labs.lab import LENGTH, mtp_loss_of_cut_sequence

RANKS = 2


def reproduce():
    mean, total = mtp_loss_of_cut_sequence(masked=0, calculate_per_token_loss=True)
    return mean, total / LENGTH  # the tokens of the main model
