"""Which norms have to agree, and which weights count as those without a gradient."""

import math

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("watch-invariants"), pytest.mark.ranks(2)]

MEASURED = {None: 3.0, "mtp": 4.0}


@pytest.mark.parametrize(
    "reported, has_own_group, norms",
    [
        ({None: 5.0}, False, [(5.0, 5.0)]),
        ({None: 3.0, "mtp": 4.0}, True, [(3.0, 3.0), (4.0, 4.0)]),
        ({None: 5.0}, True, [(5.0, 3.0), (0.0, 4.0)]),  # the tag of the heads is lost
        ({None: 4.0, "router": 3.0}, False, [(5.0, 5.0)]),
    ],
    ids=["one norm", "heads have their own", "heads should have their own", "named groups"],
)
def test_each_norm_that_an_update_reports_has_one_to_agree_with(reported, has_own_group, norms):
    from megatron_overrides.watch.gradients import select_norms

    chosen = list(select_norms(MEASURED, reported, has_own_group))
    assert [(said, measured) for _, said, measured in chosen] == norms
    assert len({name for name, _, _ in chosen}) == len(chosen)


@pytest.fixture
def check(parallel, rank):
    """check(gradients, times, with_heads): what is named in the last of so many checks of {weight: [of each rank]}."""
    parallel()
    from megatron_overrides.watch.gradients import Gradients
    from megatron_overrides.watch.tensors import Watched

    def run(gradients, times=3, with_heads=True):
        mine = [
            Watched(f"{weight} {rank}", lambda value=values[rank]: torch.tensor([0.0, value]), weight)
            for weight, values in gradients.items()
        ]
        kept = Gradients(mine, torch.device("cuda", torch.cuda.current_device()))
        for _ in range(times):
            norms = kept.measure()
            missing = kept.find_missing(with_heads)
        total = math.hypot(*(value for values in gradients.values() for value in values))
        assert math.hypot(*norms.values()) == pytest.approx(total)
        return [name for finding in missing for name in finding.names]

    return run


def test_a_weight_without_a_gradient_on_any_rank_is_named_in_the_third_check_alone(check):
    gradients = {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (0.0, 1.0), "d": (1e-30, 0.0)}
    assert [check(gradients, times) for times in (2, 3, 4)] == [[], ["b"], []]


def test_heads_without_a_gradient_are_named_only_if_they_train(check):
    gradients = {"a": (1.0, 1.0), "mtp.layers.0.b": (0.0, 0.0)}
    assert [check(gradients, with_heads=with_heads) for with_heads in (True, False)] == [["mtp.layers.0.b"], []]


def test_layers_in_one_tensor_are_weights_of_their_own_and_experts_are_not():
    from megatron_overrides.model_places import Shard
    from megatron_overrides.watch.tensors import _name_weight

    names = {
        ("decoder.layers.mlp.experts.w", (2, 5, slice(0, 4))): "decoder.layers.mlp.experts.w 2",
        ("decoder.layers.3.mlp.experts.w", (5, slice(0, 4))): "decoder.layers.3.mlp.experts.w",
        ("embedding.w", (slice(0, 4),)): "embedding.w",
    }
    for (name, region), expected in names.items():
        assert _name_weight(Shard(name, (8,), region, None, ((), (), 0))) == expected
