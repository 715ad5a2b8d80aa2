"""Each rank replays the routes of its own layers of the main model; the heads choose their experts by themselves."""

import pytest
import torch

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("leave-heads-out-of-router-replay"),
    pytest.mark.ranks(2),
]


@pytest.mark.parametrize("heads", [None, 1])
@pytest.mark.parametrize(
    "sizes, layers",
    [({"pipeline_model_parallel_size": 2}, 1), ({"expert_model_parallel_size": 2}, 2)],
    ids=["PP2", "EP2"],
)
def test_routes_of_the_main_model_are_replayed(parallel, make_gpt, heads, sizes, layers):
    from head_training import LENGTH, VOCABULARY, run_schedule
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from routes import ROUTED, replay_other_routes

    parallel(**sizes)
    RouterReplay.clear_global_router_replay_instances()
    model = make_gpt(VOCABULARY, LENGTH, mtp_num_layers=heads, pipeline_dtype=torch.float32, **sizes, **ROUTED)
    recorded, followed = replay_other_routes(model, lambda: run_schedule([model], 0))
    assert len(recorded) == layers and all(len(routes) for routes in recorded)
    routers_of_main_model = [has_followed for name, has_followed in followed.items() if name.startswith("decoder.")]
    routers_of_heads = [has_followed for name, has_followed in followed.items() if name.startswith("mtp.")]
    assert routers_of_main_model == [True] * layers and not any(routers_of_heads)
    assert len(routers_of_heads) == bool(heads and model.post_process)
