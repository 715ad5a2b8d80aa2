"""The mean loss of an MTP head, as its gradient has it, with --context-parallel-size 2 where the loss mask has the
second half of a sequence: one rank has 3 of its tokens with the loss 10, the other 5 with the loss 2.
"""

from ..lab import mean_mtp_loss, start, sum_over_ranks

RANKS = 2


def reproduce():
    import torch

    start(context_parallel_size=2)
    first, second, third, fourth = torch.arange(16).chunk(4)
    is_first_rank = torch.distributed.get_rank() == 0
    positions = torch.cat([first, fourth] if is_first_rank else [second, third])
    mean = mean_mtp_loss(positions >= 8, 10.0 if is_first_rank else 2.0)
    return (3 * 10 + 5 * 2) / 8, sum_over_ranks(mean) / RANKS
