"""The output layer as the losses of the heads call it: on any rows, attached or detached, scaled as Megatron scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel

from megatron_overrides.mtp.heads.detached_output import call_detached
from megatron_overrides.mtp.losses.vocabulary import (
    Vocabulary,
    _mtp_logits_are_vocab_sharded,
    tensor_parallel_group,
)


class Projection(NamedTuple):
    """From hidden states to logits.

    Attributes:
        output_layer: called (hidden [s, b, h], weight=, runtime_gather_output=), returns (logits [s, b, v], bias).
        weight: the tied embedding, or None if the output layer has its own weight.
        runtime_gather_output: None for the choice of the output layer.
        scale: what scales the logits (MuP), or None.
        is_detached: no gradient reaches the parameters of the output layer.
        vocabulary: that of the logits.
        sequence_parallel_group: over it the output layer gathers its input along s; None if it takes all of s.
    """

    output_layer: Callable[..., Any]
    weight: torch.Tensor | None
    runtime_gather_output: bool | None
    scale: Callable[[torch.Tensor], torch.Tensor] | None
    is_detached: bool
    vocabulary: Vocabulary
    sequence_parallel_group: Any

    @classmethod
    def create(
        cls,
        output_layer: Callable[..., Any],
        weight: torch.Tensor | None,
        runtime_gather_output: bool | None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None,
        tp_group: Any,
        is_detached: bool,
        vocab_size: int | None,
        is_sequence_parallel: bool,
    ) -> Projection:
        """Take the groups from the output layer if `tp_group` is None; `vocab_size` leaves out what pads the logits."""
        group = tensor_parallel_group(output_layer, tp_group)
        is_sharded = _mtp_logits_are_vocab_sharded(output_layer, runtime_gather_output)
        return cls(
            output_layer,
            weight,
            runtime_gather_output,
            scale,
            is_detached,
            vocabulary=Vocabulary(vocab_size, group if is_sharded else None),
            sequence_parallel_group=group if is_sequence_parallel else None,
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [s, b, v] of `hidden`, which is what the output layer itself takes."""
        output_layer = partial(call_detached, self.output_layer) if self.is_detached else self.output_layer
        logits, _ = output_layer(hidden, weight=self.weight, runtime_gather_output=self.runtime_gather_output)
        return logits if self.scale is None else self.scale(logits)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather [s / tp, b, h] of sequence parallelism; the gradient is that of any rank."""
        if self.sequence_parallel_group is None:
            return hidden
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.sequence_parallel_group
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, b, v] of any number of rows [n, b, h] that `whole` has returned."""
        if self.sequence_parallel_group is None:
            return self(hidden)
        padding = -hidden.size(0) % self.sequence_parallel_group.size()
        shard = tensor_parallel.scatter_to_sequence_parallel_region(
            F.pad(hidden, (0, 0, 0, 0, 0, padding)), group=self.sequence_parallel_group
        )
        return self(shard)[: hidden.size(0)]
