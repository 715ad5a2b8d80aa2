"""The padding mask of each router: which of its tokens count in no loss and in no expert's load.

The 1F1B overlap of experts (--overlap-moe-expert-parallel-comm) calls routers without the mask that the state of the
scheduled model chunk has. With sequence parallelism only the first stage of a GPTModel splits the mask
(NVIDIA/Megatron-LM#5563), and no stage of a HybridModel does. A router with an expert bias takes a mask since
NVIDIA/Megatron-LM#6114.
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
    layer, mask = call.instance, _scheduled_mask.get()
    if call["padding_mask"] is None and mask is not None and _takes_mask(layer.config):
        call["padding_mask"] = mask.transpose(0, 1).bool()
    if call["padding_mask"] is not None:
        call["padding_mask"] = _part_of_rank(call["padding_mask"], call["hidden_states"], layer.attn_tp_group)
    return call.proceed()


def _takes_mask(config: Any) -> bool:
    """Whether the router does not refuse one."""
    return "quantile_balancing" not in config.moe_router_load_balancing_type


def _part_of_rank(mask: torch.Tensor, hidden_states: torch.Tensor, group: Any) -> torch.Tensor:
    """The mask of the tokens that this rank of `group` has.

    `mask` is [sequence, samples], of bool; so is what is returned, with the length of `hidden_states`.
    """
    if mask.shape[0] != hidden_states.shape[0] * group.size():
        return mask
    return mask.chunk(group.size())[group.rank()]


def count_tokens_without_padding(call: Call) -> None:
    """Wraps TopKRouter._apply_expert_bias, which counts the tokens of each expert.

    The routing map is [tokens, experts]; the mask is [tokens], and released Megatron compares it with the experts.
    """
    if call["padding_mask"] is not None:
        call["routing_map"] = call["routing_map"] & ~call["padding_mask"].unsqueeze(-1)
        call["padding_mask"] = None
    call.proceed()
