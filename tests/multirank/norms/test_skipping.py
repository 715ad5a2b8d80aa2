"""Ranks decide alike whether to skip an update, whatever each of them owns; nobody is left waiting."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_overrides.norms.step_state import step_state_of

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm"), pytest.mark.ranks(2)]


@pytest.fixture
def deal_out(make_layer_wise, world_size):
    """deal_out(nested, threshold): (a LayerWise optimizer over all ranks, the parameters that it spreads over them)."""

    def make(nested, threshold):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)) for _ in range(world_size)]
        adam = torch.optim.AdamW([{"params": list(params), "is_expert_parallel": False}], lr=0.1)
        beside = 0.01 if nested else None
        return make_layer_wise(adam, beside=beside, grad_norm_skip_threshold=threshold), params

    return make


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("nested", [False, True])
def test_layer_wise_skips_everywhere_when_one_ranks_layer_blows_up(deal_out, from_all_ranks, nested):
    optimizer, params = deal_out(nested, 50.0)
    before = [param.detach().clone() for param in params]
    for scale, updated in ((100.0, False), (0.01, True)):
        for index, param in enumerate(params):
            param.main_grad = torch.full_like(param, scale if index == 1 else 0.01, dtype=torch.float32)
        result = optimizer.step()
        assert from_all_ranks(result[0]) == [updated] * dist.get_world_size()
        assert len(set(from_all_ranks(float(result[1])))) == 1
        assert [torch.equal(old, new) for old, new in zip(before, params, strict=True)] == [not updated] * len(params)


@pytest.mark.parametrize("threshold", [math.inf, 1e6])
@pytest.mark.parametrize("kind", ["distributed", "layer_wise", "nested"])
def test_a_step_reduces_once_and_costs_no_collective_more_than_upstreams(
    make_ddp_model, fill_gradients, deal_out, unpatched, count_collectives, kind, threshold
):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    def make():
        if kind == "distributed":
            model = make_ddp_model()
            fill_gradients(model, 0.01)
            config = OptimizerConfig(
                optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True, grad_norm_skip_threshold=threshold
            )
            return ChainedOptimizer([get_megatron_optimizer(config, [model])])
        optimizer, params = deal_out(kind == "nested", threshold)
        for param in params:
            param.main_grad = torch.full_like(param, 0.01, dtype=torch.float32)
        return optimizer

    def count(optimizer):
        for _ in range(2):  # 0.19 asks once, at the first step, who owns MTP parameters
            count_collectives.clear()
            assert optimizer.step()[0] is True
        return list(count_collectives)

    ours, one_more = count(make()), make()
    with unpatched():
        theirs = count(one_more)
    assert [name for name in ours if name != "all_reduce"] == [name for name in theirs if name != "all_reduce"]
    assert ours.count("all_reduce") == 1 <= theirs.count("all_reduce")


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(
    "bad, norm_of_all", [(math.nan, math.nan), (math.inf, math.inf), (25.0, math.hypot(100.0, 0.4))]
)
def test_a_norm_over_the_threshold_on_one_rank_skips_every_module_of_a_mimo_model(
    make_mimo, rank, from_all_ranks, bad, norm_of_all, bad_rank
):
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer, _ = make_mimo([param], grad_norm_skip_threshold=50.0)
    param.main_grad = torch.full_like(param, bad if rank == bad_rank else 0.1)
    assert from_all_ranks(optimizer.step()[:2]) == [(False, pytest.approx(norm_of_all, nan_ok=True))] * 2
    assert torch.equal(param, torch.ones_like(param))
    param.main_grad = torch.full_like(param, 0.1)
    assert all(from_all_ranks(optimizer.step()[0]))
    assert not torch.equal(param, torch.ones_like(param))


@pytest.mark.parametrize("method, result", [("prepare_grads", True), ("step_with_ready_grads", False)])
def test_what_one_module_of_a_mimo_model_reports_all_ranks_know(
    make_mimo, rank, from_all_ranks, monkeypatch, method, result
):
    """An overflow, or a failed update, on one rank alone."""
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer, mine = make_mimo([param])
    param.main_grad = torch.full_like(param, 0.1)
    optimizer.step()
    if rank == 1:
        monkeypatch.setattr(mine, method, lambda: result)
    assert not any(from_all_ranks(optimizer.step()[0]))
    # The training log leaves a step out that overflowed, and shows no norm of the step before.
    overflowed = method == "prepare_grads"
    actual = from_all_ranks((step_state_of(optimizer).skips, step_state_of(optimizer).norms is None))
    assert actual == [(int(overflowed), overflowed)] * dist.get_world_size()
