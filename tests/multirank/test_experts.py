"""Norms, zeros and the parameter norm count each expert once, and ranks that hold the same expert train it alike."""

import pytest

from scripts.experts.conditions import LAYOUTS, RANKS, WITH_REPLICAS, conditions

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(RANKS)]

pytest.importorskip("transformer_engine", reason="grouped experts are TransformerEngine's")


@pytest.fixture
def initialize(parallel):
    def initialize(layout):
        sizes = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
        return parallel(**dict(zip(sizes, layout, strict=True)))

    return initialize


@pytest.mark.parametrize("condition", [one for layout in LAYOUTS for one in conditions(layout)], ids=str)
def test_what_is_reported_is_what_all_gradients_give(initialize, condition):
    from scripts.experts.norms import by_hand, reported, why_not

    if reason := why_not(condition.optimizer):
        pytest.skip(reason)
    initialize(condition.layout)
    right, found = by_hand(condition), reported(condition)
    assert found.zeros == right.zeros
    assert found.main == pytest.approx(right.main, rel=1e-5)
    assert found.mtp == (right.mtp and pytest.approx(right.mtp, rel=1e-5))
    if found.parameters is not None:  # the wheel of 0.16.1 has no trainer
        assert found.parameters == pytest.approx(right.parameters, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "distributed optimizer"])
def test_tensor_parallel_ranks_that_hold_the_same_expert_train_it_alike(initialize, optimizer):
    """Up to 0.18 each of them reduced its gradient over the ranks of the dense layers, which leave the others out."""
    from scripts.experts.replicas import largest_difference

    initialize(WITH_REPLICAS)
    assert largest_difference(optimizer) == 0.0
