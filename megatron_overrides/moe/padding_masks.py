"""The padding mask of each router: which of its tokens count in no loss and in no expert's load.

The 1F1B overlap of experts (--overlap-moe-expert-parallel-comm) calls routers without the mask that the state of the
scheduled model chunk has. With sequence parallelism only the stage of a GPTModel that embeds the tokens splits the mask
(NVIDIA/Megatron-LM#5563), and no stage of a HybridModel does. A router with an expert bias takes a mask since
NVIDIA/Megatron-LM#6114.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.scoped import scoped

_scheduled_mask: ContextVar[torch.Tensor | None] = ContextVar("scheduled_mask", default=None)


def schedule_with_mask(call: Call) -> Any:
    """Wraps build_transformer_layer_callables, whose first callable routes the tokens of a layer."""
    (first, *others), backward = call.proceed()

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        has_mask = not node.is_mtp or _heads_have_masks()
        with scoped(_scheduled_mask, node.chunk_state.padding_mask if has_mask else None):
            return first(node, hidden_states)

    return [forward, *others], backward


@functools.cache
def _heads_have_masks() -> bool:
    """True if MTP heads route with a mask where nothing overlaps; from 0.18 on, and the overlap rolls it for them."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return "padding_mask" in inspect.signature(MultiTokenPredictionLayer.forward).parameters


def route_with_mask(call: Call) -> Any:
    """Wraps MoELayer.route(hidden_states, padding_mask=None): the mask is [sequence, samples] there."""
    layer, mask, scheduled_mask = call.instance, _mask_of(call), _scheduled_mask.get()
    kinds = layer.config.moe_router_load_balancing_type
    if mask is None and scheduled_mask is not None and "quantile_balancing" not in kinds:  # which refuses masks
        mask = scheduled_mask.transpose(0, 1).bool()
    if mask is not None:
        call["padding_mask"] = _part_of_rank(mask, call["hidden_states"], layer)
    return call.proceed()


def _mask_of(call: Call) -> torch.Tensor | None:
    """The second argument. Most runs have no mask: they do not pay for a look at the signature."""
    return call.args[1] if len(call.args) > 1 else call.kwargs.get("padding_mask")


def _part_of_rank(mask: torch.Tensor, hidden_states: torch.Tensor, layer: Any) -> torch.Tensor:
    """The mask of the tokens that this rank has: `mask`, [sequence, samples] of bool, or its part.

    `hidden_states` are [length on this rank, samples, hidden size].
    """
    length, samples = hidden_states.shape[:2]
    ranks = layer.attn_tp_group.size()
    is_whole = layer.config.sequence_parallel and ranks > 1 and mask.shape == (length * ranks, samples)
    return mask.chunk(ranks)[layer.attn_tp_group.rank()] if is_whole else mask


def count_tokens_without_padding(call: Call) -> None:
    """Wraps TopKRouter._apply_expert_bias(routing_map, padding_mask=None), which counts the tokens of each expert.

    The routing map is [tokens, experts]; the mask is [tokens], and released Megatron compares it with the experts. A
    mask of two dimensions is that of somebody who has mended it already, as mcore-bridge does.
    """
    mask = _mask_of(call)
    if mask is not None and mask.dim() == 1 and call.instance.enable_expert_bias and torch.is_grad_enabled():
        call["routing_map"] = call["routing_map"] & ~mask.unsqueeze(-1)
        call["padding_mask"] = None
    call.proceed()
