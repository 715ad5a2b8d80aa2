"""Norms, zeros and the parameter norm count each expert once, and ranks that hold the same expert train it alike.

--write-tables leaves out what is not measured: the parameter norm without Megatron's trainer (for 0.16.1 put a checkout
on PYTHONPATH), Muon without the emerging-optimizers of that release.
"""

import pytest

from tests.trainings.experts.conditions import LAYOUTS, RANKS, WITH_REPLICAS, conditions, sample

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-experts-in-grad-norm"), pytest.mark.ranks(RANKS)]

pytest.importorskip("transformer_engine", reason="grouped experts are TransformerEngine's")


def pytest_generate_tests(metafunc):
    if "condition" in metafunc.fixturenames:
        option = metafunc.config.option
        choose = conditions if option.write_tables or option.everywhere else sample
        metafunc.parametrize("condition", [one for layout in LAYOUTS for one in choose(layout)], ids=str)


@pytest.fixture
def initialize(parallel):
    def initialize(layout):
        sizes = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
        return parallel(**dict(zip(sizes, layout, strict=True)))

    return initialize


@pytest.fixture
def both_sides(pytestconfig):
    """both_sides(measure): what `measure` returns with the patches and, with --write-tables, without the experts'."""
    import megatron_mtp_patches

    def measure_both(measure):
        sides = {"patched": measure()}
        if pytestconfig.option.write_tables:
            megatron_mtp_patches.apply("-count-experts-in-grad-norm")
            try:
                sides["unpatched"] = measure()
            finally:
                megatron_mtp_patches.apply()
        return sides

    return measure_both


def test_what_is_reported_is_what_all_gradients_give(initialize, condition, both_sides, record_property):
    from tests.trainings.experts.norms import by_hand, reported
    from tests.trainings.muon import why_no_muon

    if reason := why_no_muon(condition.optimizer):
        record_property("experts", [str(condition), {"not run": reason}])
        pytest.skip(reason)
    initialize(condition.layout)
    right, sides = by_hand(condition), both_sides(lambda: reported(condition))
    record_property("experts", [str(condition), {"by hand": [*right], **{side: [*row] for side, row in sides.items()}}])
    norms = sides["patched"]
    assert norms.zeros == right.zeros
    assert norms.main == pytest.approx(right.main, rel=1e-5)
    assert norms.mtp == (right.mtp and pytest.approx(right.mtp, rel=1e-5))
    if norms.parameters is not None:  # the wheel of 0.16.1 has no trainer
        assert norms.parameters == pytest.approx(right.parameters, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "distributed optimizer"])
def test_tensor_parallel_ranks_that_hold_the_same_expert_train_it_alike(
    initialize, optimizer, both_sides, record_property
):
    """Up to 0.18 each of them reduced its gradient over the ranks of the dense layers, which leave the others out."""
    from tests.trainings.experts.model import largest_difference_of_replicas

    initialize(WITH_REPLICAS)
    apart = both_sides(lambda: largest_difference_of_replicas(optimizer))
    record_property("experts", [f"{WITH_REPLICAS}, {optimizer}: copies of an expert, apart", {"apart": apart}])
    assert apart["patched"] == 0.0
