"""Count the tokens of an MTP loss over the ranks that share the sequences of a microbatch.

NVIDIA/Megatron-LM#7498, #7513. Upstream counts on each rank. But context-parallel ranks have parts of the same
sequences, and a roll takes a token from only one of them. Data-parallel ranks have other microbatches: adding up their
tokens would make the number of these ranks matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class TokenCounts(NamedTuple):
    """The positions of one microbatch that count.

    Attributes:
        main: scalar, in the loss of the main model.
        losses: a scalar for each trained loss: one for each head, or a single one for e2e_tv.
        ranks: how many ranks they were added up over.
    """

    main: torch.Tensor
    losses: Sequence[torch.Tensor]
    ranks: int = 1

    def by_head(self, depths: int) -> Sequence[torch.Tensor]:
        """Return a count for each of `depths` heads; those of e2e_tv have the same positions."""
        return self.losses if len(self.losses) == depths else [self.losses[0]] * depths


def sum_token_counts(local: TokenCounts, group: Any) -> TokenCounts:
    """Add the counts of this rank up over `group`, with one all-reduce; None is this rank alone.

    A collective of all ranks of the group, once for each microbatch.
    """
    if group is None or group.size() == 1:
        return local
    counts = torch.stack([count.double() for count in (local.main, *local.losses)])
    torch.distributed.all_reduce(counts, group=group)
    main, *losses = counts.unbind()
    return TokenCounts(main, losses, group.size())
