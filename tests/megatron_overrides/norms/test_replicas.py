"""A norm counts a parameter on the ranks that hold a shard of it, or on the first that holds a replica."""

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-experts-in-grad-norm")]

FIRST, SECOND = (SimpleNamespace(rank=lambda rank=rank: rank) for rank in (0, 1))


@pytest.fixture
def counts():
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    return param_is_not_tensor_parallel_duplicate


def test_a_shard_is_counted_on_every_rank(counts):
    assert counts(SimpleNamespace(tensor_model_parallel=True), SECOND, SECOND)


@pytest.mark.parametrize("group, counted", [(FIRST, True), (SECOND, False)])
def test_a_replica_of_a_dense_layer_is_counted_on_the_first_rank_of_its_group(counts, group, counted):
    for marks in ({}, {"tensor_model_parallel": False}, {"allreduce": True}):
        assert counts(SimpleNamespace(**marks), group, FIRST) is counted


@pytest.mark.parametrize("group, counted", [(FIRST, True), (SECOND, False)])
def test_a_replica_of_an_expert_is_counted_on_the_first_rank_of_the_group_of_experts(counts, group, counted):
    assert counts(SimpleNamespace(allreduce=False), SECOND, group) is counted


@pytest.mark.parametrize("group, counted", [(FIRST, True), (SECOND, False)])
def test_the_group_of_experts_is_known_where_the_caller_does_not_say_it(counts, monkeypatch, group, counted):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "_EXPERT_TENSOR_PARALLEL_GROUP", group)
    assert counts(SimpleNamespace(allreduce=False), SECOND) is counted
    monkeypatch.setattr(parallel_state, "_EXPERT_TENSOR_PARALLEL_GROUP", None)
    assert not counts(SimpleNamespace(allreduce=False), SECOND)
    assert counts(SimpleNamespace(allreduce=False), FIRST)


def test_shards_and_main_copies_of_an_expert_are_known_as_such():
    import torch
    from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

    expert, dense, copied_expert, copied_dense = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    expert.allreduce = False
    copy_tensor_model_parallel_attributes(copied_expert, expert)
    copy_tensor_model_parallel_attributes(copied_dense, dense)
    assert copied_expert.allreduce is False
    assert not hasattr(copied_dense, "allreduce")
