"""The mean loss of an MTP head, as its gradient has it, with --calculate-per-token-loss and two sequences: one has 2
of its tokens with the loss 10, the other 4 with the loss 2. Seen with each sequence in a microbatch, expected with both
in one.
"""

from ...defects.labs.lab import mean_mtp_loss, start


def reproduce():
    import torch

    start()
    # The main model has one more token in each.
    total = sum(
        mean_mtp_loss(torch.arange(8) < 1 + tokens, loss, calculate_per_token_loss=True)
        for tokens, loss in ((2, 10.0), (4, 2.0))
    )
    return (2 * 10 + 4 * 2) / 6, total / (3 + 5)
