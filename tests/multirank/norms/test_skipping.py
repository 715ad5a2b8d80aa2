"""Ranks decide alike whether to skip an update, whatever each of them owns; nobody is left waiting."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_overrides.norms.step_state import step_state_of

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm"), pytest.mark.ranks(2)]


@pytest.mark.parametrize("chained", [True, False])
def test_distributed_optimizer_skips_everywhere_when_one_shard_blows_up(
    parallel, make_ddp_model, fill_gradients, from_all_ranks, rank, chained
):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    parallel()
    model = make_ddp_model()
    config = OptimizerConfig(
        optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True, grad_norm_skip_threshold=50.0
    )
    optimizer = get_megatron_optimizer(config, [model])
    while hasattr(optimizer, "chained_optimizers"):
        (optimizer,) = optimizer.chained_optimizers
    if chained:
        optimizer = ChainedOptimizer([optimizer])
    before = [param.detach().clone() for param in model.parameters()]

    fill_gradients(model, 100.0 if rank == 1 else 0.01)
    updated, norm, _ = optimizer.step()
    assert not any(from_all_ranks(updated))
    assert len(set(from_all_ranks(float(norm)))) == 1
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    fill_gradients(model, 0.01)
    assert all(from_all_ranks(optimizer.step()[0]))
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for param in model.parameters():
        copies = from_all_ranks(param.detach().float())
        assert all(torch.equal(copies[0], copy) for copy in copies)


@pytest.fixture
def make_layer_wise(parallel, make_ddp_model):
    """make_layer_wise(nested): a LayerWise optimizer over all ranks; nested, beside a DistributedOptimizer in a chain.

    Returns (optimizer, parameters that LayerWise spreads over the ranks).
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel()

    def make(nested, **settings):
        if nested and "step_with_ready_grads" not in vars(LayerWiseDistributedOptimizer):
            pytest.skip("before 0.18 LayerWise gathers in its own step, so it is never nested")
        settings |= {"optimizer": "adam", "lr": 0.1, "bf16": True, "use_distributed_optimizer": nested}
        config = OptimizerConfig(**settings)
        groups = ProcessGroupCollection()
        groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        groups.expt_dp = parallel_state.get_expert_data_parallel_group()
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)) for _ in range(dist.get_world_size())]
        adam = torch.optim.AdamW([{"params": list(params), "is_expert_parallel": False}], lr=0.1)
        optimizer = LayerWiseDistributedOptimizer([adam], config, groups)
        if nested:
            model = make_ddp_model()
            for buffer in model.buffers:
                buffer.grad_data.fill_(0.01)
            sibling = get_megatron_optimizer(config, [model])
            optimizer = ChainedOptimizer([optimizer, *sibling.chained_optimizers])
        return optimizer, params

    return make


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("nested", [False, True])
def test_layer_wise_skips_everywhere_when_one_ranks_layer_blows_up(make_layer_wise, from_all_ranks, nested):
    optimizer, params = make_layer_wise(nested, grad_norm_skip_threshold=50.0)
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
    make_ddp_model, fill_gradients, make_layer_wise, unpatched, count_collectives, kind, threshold
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
        optimizer, params = make_layer_wise(kind == "nested", grad_norm_skip_threshold=threshold)
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


@pytest.fixture
def make_mimo(parallel, rank, world_size):
    """make_mimo(**config): a Mimo optimizer with one module a rank, and this rank's parameter."""
    mimo = pytest.importorskip("megatron.core.models.mimo.optimizer", reason="0.16.1 has no MimoOptimizer")
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    def make(**settings):
        parallel()
        config = OptimizerConfig(optimizer="adam", lr=0.1, **settings)
        param = torch.nn.Parameter(torch.ones(4, 4))
        mine = FP32Optimizer(torch.optim.AdamW([param], lr=0.1), config, lambda *args: None)
        infos = {
            f"module{index}": mimo.ModuleOptimizerInfo(mine if index == rank else None, None, None, index == rank)
            for index in range(world_size)
        }
        return mimo.MimoOptimizer(infos, config), mine, param

    return make


def test_a_module_over_the_threshold_skips_every_module_of_a_mimo_model(make_mimo, rank, world_size, from_all_ranks):
    optimizer, _, param = make_mimo(grad_norm_skip_threshold=50.0)
    param.main_grad = torch.full_like(param, 25.0 if rank == 1 else 0.1)
    updated, norm, _ = optimizer.step()
    assert not any(from_all_ranks(updated))
    assert norm == pytest.approx(math.sqrt(100.0**2 + (world_size - 1) * 0.4**2))
    assert torch.equal(param, torch.ones_like(param))

    param.main_grad = torch.full_like(param, 0.1)
    assert all(from_all_ranks(optimizer.step()[0]))
    assert not torch.equal(param, torch.ones_like(param))


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_module_whose_norm_is_no_number_skips_every_module_whichever_rank_it_is_on(
    make_mimo, rank, from_all_ranks, bad, bad_rank
):
    optimizer, _, param = make_mimo(grad_norm_skip_threshold=50.0)
    param.main_grad = torch.full_like(param, bad if rank == bad_rank else 0.1)
    updated, norm, _ = optimizer.step()
    assert not any(from_all_ranks(updated))
    assert [repr(one) for one in from_all_ranks(norm)] == [repr(bad)] * dist.get_world_size()
    assert torch.equal(param, torch.ones_like(param))


@pytest.mark.parametrize("method, result", [("prepare_grads", True), ("step_with_ready_grads", False)])
def test_what_one_module_of_a_mimo_model_reports_all_ranks_know(
    make_mimo, rank, from_all_ranks, monkeypatch, method, result
):
    """An overflow, or a failed update, on one rank alone."""
    optimizer, mine, param = make_mimo()
    param.main_grad = torch.full_like(param, 0.1)
    optimizer.step()
    if rank == 1:
        monkeypatch.setattr(mine, method, lambda: result)
    assert not any(from_all_ranks(optimizer.step()[0]))
    # The training log leaves a step out that overflowed, and shows no norm of the step before.
    overflowed = method == "prepare_grads"
    actual = from_all_ranks((step_state_of(optimizer).skips, step_state_of(optimizer).norms is None))
    assert actual == [(int(overflowed), overflowed)] * dist.get_world_size()
