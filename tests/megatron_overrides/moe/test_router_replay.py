"""Replayed routes are the main model's, and the heads choose their experts by themselves."""

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from tests.trainings.routes import ROUTED, replay_other_routes

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("leave-heads-out-of-router-replay")]

VOCABULARY, LENGTH = 32, 12


@pytest.fixture(autouse=True)
def no_routers_of_other_tests():
    RouterReplay.clear_global_router_replay_instances()


@pytest.mark.parametrize("heads", [None, 1])
def test_routes_of_the_main_model_are_replayed(make_gpt, heads):
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=heads, **ROUTED)
    tokens = torch.arange(LENGTH).expand(2, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    recorded, followed = replay_other_routes(model, lambda: model(tokens, tokens, mask, labels=tokens))
    assert [len(routes) for routes in recorded] == [2 * LENGTH] * 2
    assert len(followed) == 2 + (heads or 0)
    assert {name for name, has_followed in followed.items() if has_followed} == {
        name for name in followed if name.startswith("decoder.")
    }


def test_trainers_that_walk_the_routers_find_none_of_heads(make_gpt):
    """NeMo-RL does. The numbers of heads' layers are those of layers in the main model, too."""
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=1, **ROUTED)
    assert [name for name, module in model.named_modules() if getattr(module, "router_replay", None)] == [
        f"decoder.layers.{number}.mlp.router" for number in range(2)
    ]


def test_routes_of_heads_are_refused(make_gpt):
    make_gpt(VOCABULARY, LENGTH, mtp_num_layers=1, **ROUTED)
    routes = torch.zeros(LENGTH, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="routes of 3 layers, and 2 routers .* give the routes of the main model"):
        RouterReplay.set_replay_data([routes] * 3)
    with pytest.raises(ValueError, match="does not match instances"):
        RouterReplay.set_replay_data([routes])


def test_a_model_that_replays_nothing_has_no_routers_in_the_list(make_gpt):
    make_gpt(VOCABULARY, LENGTH, **{**ROUTED, "moe_enable_routing_replay": False})
    assert not RouterReplay.global_router_replay_instances
