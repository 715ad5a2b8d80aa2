"""Align the hidden states of the main model with those of the heads: head d at row i is compared with row i + d.

On one rank they are aligned already. Under context parallelism a rank has two chunks of each sequence, and the rows
that follow a chunk are on another rank: they are fetched and put behind the chunk. So chunks of rows can be taken one
after the other, and the output layer sees each row of the main model once, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_overrides.mtp.packed.packed_layout import has_padding

Roll = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class MainModelRows(NamedTuple):
    """The main model's hidden states with those that follow each chunk.

    Attributes:
        hidden: [n + D, b, h]; what head d is compared with at a position lies d rows below the row of that position.
        num_rows: n, the rows that positions may have.
        places: [s], the row of each position of this rank; None if position i has row i.
    """

    hidden: torch.Tensor
    num_rows: int
    places: torch.Tensor | None = None

    def spread(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Put what belongs to the s positions along `dim` into their rows; the other rows are 0."""
        if self.places is None:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = self.num_rows
        return tensor.new_zeros(shape).index_copy(dim, self.places, tensor)

    def collect(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Take out what belongs to the s positions: the inverse of `spread`."""
        return tensor if self.places is None else tensor.index_select(dim, self.places)


def line_up(hidden: torch.Tensor, depths: int, roll: Roll, packed_seq_params: Any, cp_group: Any) -> MainModelRows:
    """Return the rows for `hidden`, [s, b, h] without a gradient, of this rank and for heads of depth 1 to `depths`.

    Args:
        roll: [..., s] to the next position of each sequence, with messages between the context-parallel ranks.
    """
    if cp_group is None or cp_group.size() == 1:
        return MainModelRows(F.pad(hidden, (0, 0, 0, 0, 0, depths)), hidden.size(0))
    ends = _ends_of_chunks(hidden.size(0), hidden.device, packed_seq_params, cp_group)
    positions = torch.arange(hidden.size(0), device=hidden.device)
    places = positions + depths * torch.searchsorted(ends, positions)
    after_ends = ends + depths * torch.arange(ends.numel(), device=ends.device)
    num_rows = hidden.size(0) + depths * ends.numel()
    rows = hidden.new_zeros(num_rows + depths, *hidden.shape[1:]).index_copy_(0, places, hidden)
    rolled = hidden.permute(1, 2, 0)
    for depth in range(1, depths + 1):
        rolled, _ = roll(rolled)
        # A sequence without tokens here may end before the first slot; nothing reads its rows.
        following = rolled.index_select(-1, ends.clamp(min=0)).permute(2, 0, 1)
        rows.index_copy_(0, after_ends + depth, following)
    return MainModelRows(rows, num_rows, places)


def _ends_of_chunks(num_slots: int, device: torch.device, packed_seq_params: Any, cp_group: Any) -> torch.Tensor:
    """Return the last slot of each chunk of each sequence on this rank, in order: [2 sequences]."""
    if packed_seq_params is None:
        return torch.tensor([num_slots // 2 - 1, num_slots - 1], device=device)
    is_padded = has_padding(packed_seq_params)
    bounds = packed_seq_params.cu_seqlens_q_padded if is_padded else packed_seq_params.cu_seqlens_q
    bounds = bounds.to(device, torch.long)
    chunks = bounds.diff() // (2 * cp_group.size())
    begins = bounds[:-1] // cp_group.size()
    return torch.stack([begins + chunks - 1, begins + 2 * chunks - 1], dim=1).flatten()
