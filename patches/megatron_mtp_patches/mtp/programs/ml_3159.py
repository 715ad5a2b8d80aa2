"""The mean loss of an MTP head, as its gradient has it, with --calculate-per-token-loss, where each of its tokens has
the loss 1.
"""

from ...defects.labs.lab import LENGTH, mean_mtp_loss, start


def reproduce():
    import torch

    start()
    total = mean_mtp_loss(torch.ones(LENGTH), 1.0, calculate_per_token_loss=True)
    return 1.0, total / LENGTH  # the tokens of the main model
