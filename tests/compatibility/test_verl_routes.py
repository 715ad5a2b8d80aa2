"""verl's class of routes takes the place of Megatron's: it replays the decoder, and heads route by themselves."""

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction, apply_router_replay_patch
from verl.utils.megatron.router_replay_utils import iter_model_routers

from tests.trainings.routes import EXPERTS, ROUTED, followers

pytestmark = pytest.mark.forked("patched")

VOCABULARY, LENGTH = 32, 12


def test_verl_replays_the_routes_of_the_decoder(make_gpt):
    apply_router_replay_patch()  # for the life of this fork
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=1, **ROUTED)
    tokens = torch.arange(LENGTH).expand(2, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    model(tokens, tokens, mask, labels=tokens)
    routers = [router for _, router in iter_model_routers(model)]
    replayed = [(router.recorded_topk_idx + 1) % EXPERTS for router in routers]
    for router, routes in zip(routers, replayed, strict=True):
        router.set_target_indices(routes)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    followed = followers(model, lambda: model(tokens, tokens, mask, labels=tokens), replayed)
    assert followed == {name: name.startswith("decoder.") for name in followed} and len(followed) == 3
