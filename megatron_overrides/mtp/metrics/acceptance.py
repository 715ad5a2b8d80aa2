"""The acceptance rate of an MTP head, as upstream measures it: how often its most likely token is the label.

NVIDIA/Megatron-LM#3458, with exact counts and one tensor-parallel collective instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_overrides.mtp.losses.vocabulary import (
    _mtp_logits_are_vocab_sharded,
    most_likely_token,
    tensor_parallel_group,
)


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
        output_layer, runtime_gather_output: they say whether the logits are gathered.
        tp_group: None means the group of the output layer; if that has none, Megatron's own.

    Returns:
        (correct, total), int64 scalars for this rank's tokens, the same on all ranks of `tp_group`.
    """
    is_sharded = _mtp_logits_are_vocab_sharded(output_layer, runtime_gather_output)
    predicted = most_likely_token(mtp_logits, tensor_parallel_group(output_layer, tp_group) if is_sharded else None)
    is_counted = loss_mask.transpose(0, 1).bool()
    return ((predicted == mtp_labels.transpose(0, 1)) & is_counted).sum(), is_counted.sum()
