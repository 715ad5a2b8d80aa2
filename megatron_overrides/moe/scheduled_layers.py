"""Padding masks of layers that the 1F1B overlap of experts schedules (--overlap-moe-expert-parallel-comm).

The state of a scheduled model chunk has the mask, and the scheduled layers call their routers without it, so routers
count padding in their losses and in the load of experts.
"""

from __future__ import annotations

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
        with scoped(_scheduled_mask, node.chunk_state.padding_mask):
            return first(node, hidden_states)

    return [forward, *others], backward


def route_with_mask(call: Call) -> Any:
    """Wraps MoELayer.route(hidden_states, padding_mask=None): the mask is [sequence, samples] there."""
    mask = _scheduled_mask.get()
    if mask is not None and call["padding_mask"] is None and _takes_mask(call.instance.config):
        call["padding_mask"] = _part_of_rank(mask.transpose(0, 1).bool(), call["hidden_states"])
    return call.proceed()


def _takes_mask(config: Any) -> bool:
    """Whether the routers of released Megatron do not end in an error with a mask (#6114 for the expert bias)."""
    balancing = config.moe_router_load_balancing_type
    return not (config.moe_router_enable_expert_bias or "quantile_balancing" in balancing)


def _part_of_rank(mask: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The mask of the tokens that this rank has: with sequence parallelism only the first stage cuts it (#5563).

    `mask` is [sequence, samples], of bool; so is what is returned, with the length of `hidden_states`.
    """
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    is_cut = mask.shape[0] == hidden_states.shape[0]
    return mask if is_cut else scatter_to_sequence_parallel_region(mask.contiguous())
