"""Count the tokens of an MTP loss over all ranks that share its mean, so that it does not depend on how they are cut.

NVIDIA/Megatron-LM#7498, #7513, #7452. Upstream counts on each rank. But context-parallel ranks have parts of the same
sequences, a roll takes a token from only one of them, and `finalize_model_grads` divides by the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state


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


def mean_group(config: Any, cp_group: Any, process_groups: Any) -> Any:
    """Return the process group that shares the mean of an MTP loss.

    Without `config.calculate_per_token_loss` DDP averages over the replicas, each of which has its own mean: they are
    the context-parallel ranks. With it, they are those over which `finalize_model_grads` adds up the tokens.

    Args:
        process_groups: the ProcessGroupCollection of the model, or None for Megatron's global groups.
    """
    if not config.calculate_per_token_loss:
        return cp_group
    for name in ("dp_cp_gtp_remat", "dp_cp"):
        group = getattr(process_groups, name, None)
        if group is not None:
            return group
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
