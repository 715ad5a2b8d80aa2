"""The mean loss of an MTP head, as its gradient has it, with --calculate-per-token-loss on two data-parallel ranks of
which one has 2 tokens with the loss 10 and the other 4 with the loss 2.
"""

from ..lab import mean_mtp_loss, start, sum_over_ranks

RANKS = 2


def reproduce():
    import torch

    start()
    tokens, loss = ((2, 10.0), (4, 2.0))[torch.distributed.get_rank()]
    loss_mask = torch.arange(8) < 1 + tokens  # the main model has one more
    total = mean_mtp_loss(loss_mask, loss, calculate_per_token_loss=True)
    return (2 * 10 + 4 * 2) / 6, sum_over_ranks(total) / sum_over_ranks(1 + tokens)
