"""Recorded and replayed routes of experts are those of the main model; MTP heads route by themselves.

NVIDIA/Megatron-LM#7404: `RouterReplay` lists the routers of heads behind those of the main model. Routes that an
inference engine has recorded have no heads, and heads that do not run record none.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def route_heads_by_themselves(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__: its routers are not in the list, and no action reaches them."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    call.proceed()
    for module in call.instance.modules():
        replay = getattr(module, "router_replay", None)
        if isinstance(replay, RouterReplay):  # verl gives routers one of its own
            RouterReplay.global_router_replay_instances.remove(replay)
            module.router_replay = None


def refuse_routes_of_heads(call: Call) -> Any:
    """Wraps RouterReplay.set_replay_data(all_layers_topk_indices): int [tokens, topk] for each router of this rank.

    Raises:
        ValueError: there are more, as where routes of heads stand behind those of the main model.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routes, routers = len(call["all_layers_topk_indices"]), len(RouterReplay.global_router_replay_instances)
    if routes > routers:
        raise ValueError(
            f"RouterReplay.set_replay_data: there are routes of {routes} layers, and {routers} routers to replay them. "
            f"MTP heads route by themselves: give the routes of the main model's layers alone"
        )
    return call.proceed()
