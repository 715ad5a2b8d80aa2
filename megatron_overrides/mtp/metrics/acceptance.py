"""The acceptance rate of an MTP head, as upstream measures it: how often its most likely token is the label.

NVIDIA/Megatron-LM#3458, with exact counts and one tensor-parallel collective instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_overrides.mtp.forward_pass import current
from megatron_overrides.mtp.losses.vocabulary import tensor_parallel_group


def _mtp_logits_are_vocab_sharded(output_layer: Callable[..., Any] | None, runtime_gather_output: bool | None) -> bool:
    """Whether each tensor-parallel rank holds only the logits of its part of the vocabulary."""
    if runtime_gather_output is not None:
        return not runtime_gather_output
    return not getattr(output_layer, "gather_output", False)


def _vocab_parallel_argmax(vocab_parallel_logits: torch.Tensor, tp_group: Any, tp_size: int) -> torch.Tensor:
    """The vocabulary index of the largest logit over all ranks of `tp_group`.

    Args:
        vocab_parallel_logits: [..., v / tp_size], the logits of this rank's part of the vocabulary.

    Returns:
        [...] int64, the same on every rank.
    """
    largest, index = vocab_parallel_logits.max(dim=-1)
    # One message carries both. float64 represents every logit and every index exactly.
    local = torch.stack([largest.double(), index.double()])
    gathered = local.new_empty(tp_size, *local.shape)
    torch.distributed.all_gather_into_tensor(gathered.view(-1), local.view(-1), group=tp_group)
    winner = gathered[:, 0].argmax(dim=0, keepdim=True)
    index = gathered[:, 1].gather(0, winner)
    return (winner * vocab_parallel_logits.size(-1) + index.long()).squeeze(0)


def most_likely_token(logits: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """The vocabulary index of the largest logit of [..., v]; `tp_group` is None if each rank has all of them."""
    if tp_group is None or tp_group.size() == 1:
        return logits.argmax(dim=-1)
    return _vocab_parallel_argmax(logits, tp_group, tp_group.size())


def check_shapes(logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor) -> None:
    """Raise ValueError unless they are tensors [s, b, v], [b, s] and [b, s]."""
    shapes = {
        name: list(tensor.shape) if isinstance(tensor, torch.Tensor) else f"of a {type(tensor).__name__}"
        for name, tensor in (("logits", logits), ("labels", labels), ("loss_mask", loss_mask))
    }
    if len(shapes["logits"]) != 3 or any(shapes[name] != shapes["logits"][1::-1] for name in ("labels", "loss_mask")):
        passed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"acceptance takes logits [s, b, v], labels [b, s] and loss_mask [b, s], not {passed}")


@torch.no_grad()
def _compute_mtp_acceptance_counts(
    mtp_logits: torch.Tensor,
    mtp_labels: torch.Tensor,
    loss_mask: torch.Tensor,
    output_layer: Callable[..., Any] | None,
    runtime_gather_output: bool | None,
    tp_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the positions where the most likely token is the label.

    Args:
        mtp_logits: [s, b, v], or [s, b, v / tp] if the logits are not gathered.
        mtp_labels: [b, s] int64.
        loss_mask: [b, s]; positions with 0 do not count.
        output_layer, runtime_gather_output: None for those of the forward pass (mcore-bridge gives no output layer).
        tp_group: None means the group of the output layer; if that has none, Megatron's own.

    Returns:
        (correct, total), int64 scalars for this rank's tokens, the same on all ranks of `tp_group`.
    """
    if output_layer is None:
        output_layer, runtime_gather_output = current().output_layer or (None, runtime_gather_output)
    is_sharded = _mtp_logits_are_vocab_sharded(output_layer, runtime_gather_output)
    predicted = most_likely_token(mtp_logits, tensor_parallel_group(output_layer, tp_group) if is_sharded else None)
    counts = loss_mask.transpose(0, 1).bool()
    return ((predicted == mtp_labels.transpose(0, 1)) & counts).sum(), counts.sum()
