"""How many tokens an MTP head guesses right: what speculative decoding with it would accept.

NVIDIA/Megatron-LM#3458, with one tensor-parallel collective instead of two and exact counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state


def _mtp_logits_are_vocab_sharded(output_layer: Callable[..., Any], runtime_gather_output: bool | None) -> bool:
    """Whether each tensor-parallel rank holds the logits of its own part of the vocabulary."""
    if runtime_gather_output is not None:
        return not runtime_gather_output
    return not getattr(output_layer, "gather_output", False)


def _vocab_parallel_argmax(vocab_parallel_logits: torch.Tensor, tp_group: Any, tp_size: int) -> torch.Tensor:
    """The vocabulary index of the largest logit over all ranks of `tp_group`.

    Args:
        vocab_parallel_logits: [..., v / tp_size], the part of the vocabulary of this rank.

    Returns:
        [...] int64, the same on every rank.
    """
    largest, index = vocab_parallel_logits.max(dim=-1)
    # Both in one message. float64 holds every logit and every index exactly.
    mine = torch.stack([largest.double(), index.double()])
    everyone = mine.new_empty(tp_size, *mine.shape)
    torch.distributed.all_gather_into_tensor(everyone.view(-1), mine.view(-1), group=tp_group)
    winner = everyone[:, 0].argmax(dim=0, keepdim=True)
    index = everyone[:, 1].gather(0, winner)
    return (winner * vocab_parallel_logits.size(-1) + index.long()).squeeze(0)


@torch.no_grad()
def _compute_mtp_acceptance_counts(
    mtp_logits: torch.Tensor,
    mtp_labels: torch.Tensor,
    loss_mask: torch.Tensor,
    output_layer: Callable[..., Any],
    runtime_gather_output: bool | None,
    tp_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the positions where the most likely token is the label.

    Args:
        mtp_logits: [s, b, v], or [s, b, v / tp] where the logits are not gathered.
        mtp_labels: [b, s] int64.
        loss_mask: [b, s]; positions with 0 do not count.
        tp_group: None takes the group of the output layer, or else Megatron's own.

    Returns:
        (correct, total), int64 scalars of this rank's tokens. The ranks of `tp_group` agree.
    """
    if _mtp_logits_are_vocab_sharded(output_layer, runtime_gather_output):
        if tp_group is None:
            tp_group = getattr(output_layer, "tp_group", None)
        if tp_group is None and parallel_state.is_initialized():
            tp_group = parallel_state.get_tensor_model_parallel_group()
    else:
        tp_group = None
    tp_size = 1 if tp_group is None else tp_group.size()
    alone = tp_size == 1
    predicted = mtp_logits.argmax(dim=-1) if alone else _vocab_parallel_argmax(mtp_logits, tp_group, tp_size)
    counts = loss_mask.transpose(0, 1).bool()
    return ((predicted == mtp_labels.transpose(0, 1)) & counts).sum(), counts.sum()
