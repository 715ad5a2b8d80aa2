"""The mean loss of an MTP head, as its gradient has it, with --calculate-per-token-loss and --context-parallel-size 2
where the loss mask has the second half of a sequence: one rank has 3 of its tokens with the loss 10, the other 5 with
the loss 2.
"""

from ...defects.labs.lab import mtp_loss_of_cut_sequence

RANKS = 2


def reproduce():
    mean, total = mtp_loss_of_cut_sequence(calculate_per_token_loss=True)
    return mean, total / 8  # the tokens of the main model
