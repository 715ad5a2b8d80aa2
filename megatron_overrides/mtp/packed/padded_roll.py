"""Roll packed sequences with padding: each within its tokens, wherever the padding puts them.

NVIDIA/Megatron-LM#4495, #6205, #6912, #7278, and #3035 for 0.16. Upstream looks for the tokens where they would lie
without padding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.mtp.packed.packed_layout import PackedLayout, has_padding, locate


def check_tensor(tensor: object) -> None:
    """Raise TypeError unless it is a tensor [..., n]."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        raise TypeError(f"roll takes a tensor [..., s] of tokens, labels or a mask, not {tensor!r}")


def roll_to_next(
    tensor: torch.Tensor, packed_seq_params: Any = None, cp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the next token of its sequence into each slot of [..., n], and 0 where there is none; return it and its sum.

    As Megatron's roll_tensor with roll-padded-packed-sequences, whether that patch is applied or not.
    """
    if has_padding(packed_seq_params):
        rolled = roll_left(tensor, packed_seq_params, cp_group)
        return rolled, rolled.sum()
    if packed_seq_params is None:
        return mtp.roll_tensor(tensor, shifts=-1, dims=-1, cp_group=cp_group)
    packed = without_empty_sequences(packed_seq_params, cp_group)
    end = int(packed.cu_seqlens_q[-1]) // (1 if cp_group is None else cp_group.size())
    if end > tensor.size(-1):
        raise ValueError(f"the packed sequences have {end} slots on this rank, and the tensor {tensor.size(-1)}")
    rolled, total = mtp.roll_tensor(tensor, shifts=-1, dims=-1, cp_group=cp_group, packed_seq_params=packed)
    if end < tensor.size(-1):  # Megatron leaves what follows the last sequence as it is
        rolled[..., end:] = 0
        total = rolled.sum()
    return rolled, total


def ones_without_padding(targets: torch.Tensor, packed_seq_params: Any, cp_group: Any) -> torch.Tensor:
    """Return a loss mask for `targets`, [b, s]: 1 where there is a token, 0 where there is padding."""
    if not has_padding(packed_seq_params):
        return torch.ones_like(targets)
    layout = locate(packed_seq_params, targets.size(-1), targets.device, cp_group)
    return (layout.position < layout.length).to(targets.dtype).expand_as(targets)


def roll_left(tensor: torch.Tensor, packed_seq_params: Any, cp_group: Any) -> torch.Tensor:
    """Put the next token of its sequence into each slot of [..., n], and 0 where there is none."""
    layout = locate(packed_seq_params, tensor.size(-1), tensor.device, cp_group)
    rolled = tensor.roll(-1, dims=-1)
    if cp_group is not None and cp_group.size() > 1:
        rolled = _join_chunks(rolled, tensor, layout, cp_group)
    return rolled.masked_fill(layout.position + 1 >= layout.length, 0)


def _join_chunks(rolled: torch.Tensor, tensor: torch.Tensor, layout: PackedLayout, cp_group: Any) -> torch.Tensor:
    """Put into the last slot of each chunk the token that the next chunk begins with.

    That is on the next rank for the first chunk of a sequence here, on the previous one for the second. On the last
    rank the second chunk continues the first; on the first rank the second chunk ends the sequence.
    """
    rank, ranks = cp_group.rank(), cp_group.size()
    neighbors = dist.get_process_group_ranks(cp_group)
    last_slot = tensor.size(-1) - 1  # an empty sequence may begin after it
    begins = [(layout.begin + offset).clamp(max=last_slot) for offset in (0, layout.chunk)]
    first, second = (tensor.index_select(-1, slots) for slots in begins)
    from_next, from_previous = torch.empty_like(first), torch.empty_like(second)
    messages = []
    if rank > 0:
        messages += [(dist.isend, first, rank - 1), (dist.irecv, from_previous, rank - 1)]
    if rank < ranks - 1:
        messages += [(dist.irecv, from_next, rank + 1), (dist.isend, second, rank + 1)]
    operations = [dist.P2POp(message, data, neighbors[peer], cp_group) for message, data, peer in messages]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank < ranks - 1:
        rolled = torch.where(layout.ends_chunk(1), from_next[..., layout.sequence], rolled)
    if rank > 0:
        rolled = torch.where(layout.ends_chunk(2), from_previous[..., layout.sequence], rolled)
    return rolled


def without_empty_sequences(packed_seq_params: Any, cp_group: Any) -> Any:
    """Leave out the sequences that have no token on a rank: 0.16 fails there, newer releases skip them."""
    bounds = packed_seq_params.cu_seqlens_q
    if bounds is None or cp_group is None or cp_group.size() == 1:
        return packed_seq_params
    keeps = (bounds // cp_group.size()).diff() > 0
    without = copy.copy(packed_seq_params)
    without.cu_seqlens_q = torch.cat([bounds[:1], bounds[1:][keeps]])
    return without
