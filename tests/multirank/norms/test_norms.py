"""One reduction gives every rank the same norms, of the main model and of the MTP heads, whatever each rank owns."""

import math

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-mtp-grads-separately"), pytest.mark.ranks(2)]


@pytest.mark.guards("read-gradients-in-their-dtype")
def test_gradients_of_two_dtypes_on_one_rank_only(make_leaf, from_all_ranks, count_collectives, rank):
    """As with a precision-aware optimizer whose main gradients are bf16, and fp32 for some parameters."""
    from megatron_overrides.norms.measuring import measure

    optimizer = make_leaf({None: 0.0, "mtp": 0.0, "mtp ": 0.0} if rank == 0 else {None: 0.0})
    optimizer.config.use_precision_aware_optimizer = True
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    for param, dtype in zip(optimizer.get_parameters(), (torch.bfloat16, torch.float32, torch.bfloat16), strict=False):
        param.grad_norm_group = None
        param.decoupled_grad = torch.full((4,), 0.25, dtype=dtype)
    total = measure(optimizer).total[None]
    assert from_all_ranks(float(total)) == [pytest.approx(1.0)] * 2  # four gradients, each with the norm 0.5
    assert count_collectives == ["all_reduce"]


def test_sharded_gradients_are_summed_over_their_shards(parallel, from_all_ranks, world_size):
    """As with FSDP2: DTensors, whose ranks the optimizer does not know."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parallel()
    mesh = init_device_mesh("cpu", (world_size,))
    params = []
    for norm in (3.0, 4.0):
        param = torch.nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Shard(0)]))
        param.main_grad = distribute_tensor(torch.full((16,), norm / 4), mesh, [Shard(0)])
        params.append(param)
    params[1].grad_norm_group = "mtp"
    config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=1.0)
    optimizer = FP32Optimizer(torch.optim.AdamW(params, lr=0.1), config, lambda *args: None)
    optimizer.prepare_grads()
    assert from_all_ranks(optimizer.get_grad_norm()) == [pytest.approx(3.0)] * world_size
    assert optimizer.mtp_grad_norm == pytest.approx(4.0)


@pytest.mark.parametrize("nested", [False, True])
def test_layer_wise_reduces_the_heads_over_all_ranks(make_layer_wise, from_all_ranks, unpatched, nested):
    """Rank r owns the r-th parameter, one of the heads, with a gradient norm of r + 1."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    params = [torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(2)]
    for param in params:
        param.grad_norm_group = "mtp"
    adam = torch.optim.AdamW([{"params": list(params), "is_expert_parallel": False}], lr=0.1)
    optimizer = make_layer_wise(adam, beside=0.0 if nested else None)

    def measure():
        for index, param in enumerate(params):
            param.main_grad = torch.full((4, 4), (index + 1) / 4)
        optimizer.prepare_grads()
        return from_all_ranks(float(optimizer._compute_grad_norms_by_group()["mtp"]))

    assert measure() == [pytest.approx(math.hypot(1, 2))] * 2
    with unpatched():
        if nested and hasattr(ChainedOptimizer, "_get_grad_norm_for_group"):
            assert len(set(measure())) > 1, "upstream has fixed it: the repair can go"


def test_mimo_clips_the_heads_separately(make_mimo, world_size, from_all_ranks):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    params[1].grad_norm_group = "mtp"
    for param, norm in zip(params, (3.0, 4.0), strict=True):
        param.main_grad = torch.full((4,), norm / 2)
    optimizer, _ = make_mimo(params, clip_grad=1.0)
    updated, norm, _ = optimizer.step()
    results = from_all_ranks((updated, float(norm), float(optimizer.mtp_grad_norm)))
    main, heads = pytest.approx(3.0 * math.sqrt(world_size)), pytest.approx(4.0 * math.sqrt(world_size))
    assert results == [(True, main, heads)] * world_size
    for param in params:
        assert float(param.grad.norm()) == pytest.approx(1 / math.sqrt(world_size), rel=1e-4)
