"""The positions of the tokens of packed sequences with padding, on one rank or on those of context parallelism.

`cu_seqlens_q_padded` is where each sequence begins in the pack, `cu_seqlens_q` how many tokens it has. Under context
parallelism over R ranks, TransformerEngine cuts each padded sequence into 2 R chunks of one length. Rank r has chunk r
and, right after it, chunk 2 R - 1 - r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class PackedLayout(NamedTuple):
    """The slots of this rank, one for each token or padding, and its chunks of the sequences.

    Slots after the last sequence belong to one more sequence, which is empty. There is no host-device sync.

    Attributes:
        sequence: [n], the sequence that each slot belongs to.
        offset: [n], how many slots of that sequence this rank has before it.
        position: [n], the position in that sequence.
        length: [n], the number of tokens of that sequence.
        begin: [sequences + 1], the slot where the first chunk of each sequence begins.
        chunk: [sequences + 1], the length of a chunk of each sequence.
    """

    sequence: torch.Tensor
    offset: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor
    begin: torch.Tensor
    chunk: torch.Tensor

    def ends_chunk(self, number: int) -> torch.Tensor:
        """True if each slot is the last one of the first (1) or the second (2) chunk of its sequence."""
        return self.offset + 1 == number * self.chunk[self.sequence]


def has_padding(packed_seq_params: Any) -> bool:
    """True if the tokens of the sequences may end before their slots.

    Hybrid context parallelism gives each sample separate ranks and both bounds, which are equal.
    """
    if (
        packed_seq_params is None
        or packed_seq_params.cu_seqlens_q is None
        or packed_seq_params.local_cp_size is not None
    ):
        return False
    padded = packed_seq_params.cu_seqlens_q_padded
    return padded is not None and padded is not packed_seq_params.cu_seqlens_q


def locate(packed_seq_params: Any, num_slots: int, device: torch.device, cp_group: Any) -> PackedLayout:
    """Return the layout of `num_slots` slots, which are those of this rank of `cp_group` (None: the whole pack)."""
    rank, ranks = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
    bounds = packed_seq_params.cu_seqlens_q_padded.to(device, torch.long)
    lengths = packed_seq_params.cu_seqlens_q.to(device, torch.long).diff()
    begin = bounds // ranks
    chunk = F.pad(bounds.diff() // (2 * ranks), (0, 1))
    slots = torch.arange(num_slots, device=device)
    sequence = torch.searchsorted(begin[1:], slots, right=True)
    offset = slots - begin[sequence]
    chunks_of_others = torch.where(offset < chunk[sequence], rank, 2 * (ranks - 1) - rank)
    position = offset + chunks_of_others * chunk[sequence]
    return PackedLayout(sequence, offset, position, F.pad(lengths, (0, 1))[sequence], begin, chunk)
