"""Record the routes of experts in a model, replay others, and see which routers have followed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

EXPERTS = 4
ROUTED = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_enable_routing_replay": True, "add_bias_linear": False}


def replay_other_routes(model: torch.nn.Module, run: Callable[[], object]) -> tuple[list[Any], dict[str, bool]]:
    """Record a pass, and replay the next expert of each that was chosen. Return the recorded routes and `followers`."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    run()
    recorded = RouterReplay.get_recorded_data()
    replayed = [(routes + 1) % EXPERTS for routes in recorded]
    RouterReplay.set_replay_data(replayed)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return recorded, followers(model, run, replayed)


def followers(model: torch.nn.Module, run: Callable[[], object], replayed: list[Any]) -> dict[str, bool]:
    """For each router by name, whether it follows one of these routes; it chooses by its own scores otherwise."""
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    followed: dict[str, bool] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(router: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            own = router.gating(inputs[0]).view(-1, EXPERTS).topk(2).indices
            ways = {True: replayed, False: [own]}
            chosen = [way for way, routes in ways.items() if any(_are_routes(output[1], each) for each in routes)]
            assert len(chosen) == 1, chosen
            followed[name] = chosen[0]

        return hook

    handles = [router.register_forward_hook(look(name)) for name, router in routers.items()]
    run()
    for handle in handles:
        handle.remove()
    return followed


def _are_routes(routing_map: torch.Tensor, routes: torch.Tensor) -> bool:
    return torch.equal(routing_map.long(), torch.zeros_like(routing_map, dtype=torch.long).scatter(1, routes.long(), 1))
