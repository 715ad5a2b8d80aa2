"""Megatron-FSDP under a precision-aware optimizer trains as plain PyTorch does, from one copy of the main weights."""

import pytest
import torch
import torch.distributed as dist

from megatron_overrides.norms.groups import tagged_group
from tests.trainings.fsdp import (
    CLIP,
    CLOSE,
    LR,
    Reference,
    about,
    assert_same,
    backward,
    gradient,
    make_net,
    strategies_and_overlaps,
    train,
    whole,
)

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("fsdp-without-master-weights", "sum-fsdp-gradients-in-fp32"),
    pytest.mark.ranks(2),
]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
pytest.importorskip("transformer_engine", reason="a precision-aware optimizer is TransformerEngine's FusedAdam")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@strategies_and_overlaps
def test_ten_steps_are_those_of_plain_pytorch(make_fsdp, from_all_ranks, strategy, dtype, overlap):
    training, reference = make_fsdp(strategy, dtype, overlap=overlap), Reference(dtype)
    right = reference.train(range(10))
    first, last = (sum(from_all_ranks(right[step][0])) for step in (0, -1))
    assert last < first / 2 and all(norm > CLIP for _, norm, _ in right[:3])  # it learns, and is clipped
    actual = train(training, range(10))
    assert actual == about(right)
    assert_same(whole(training), reference.weights, **CLOSE)


def test_heads_are_clipped_separately(make_fsdp):
    def mark(net):
        for param in net[1].parameters():
            param.grad_norm_group = "mtp"

    reference = Reference(torch.bfloat16)
    reference.gradients(0)
    heads = torch.cat([w.grad.flatten() for name, w in reference.weights.items() if name.startswith("1.")])
    others = torch.cat([w.grad.flatten() for name, w in reference.weights.items() if not name.startswith("1.")])
    training = make_fsdp(mark=mark)
    backward(training, 0)
    assert training.optimizer.step()[1] == pytest.approx(float(others.norm()), rel=1e-6)
    assert training.optimizer.mtp_grad_norm == pytest.approx(float(heads.norm()), rel=1e-6)


def test_the_mtp_heads_of_a_gpt_keep_their_tag(make_fsdp, make_gpt):
    """Megatron-FSDP makes parameters of its own, on which no attribute of the model's is left."""
    training = make_fsdp(net=make_gpt(32, 8, mtp_detach_heads=True).bfloat16())
    named = training.model.module.param_and_grad_buffer.optimizer_named_parameters
    groups = {name: tagged_group(param) for name, param in named}
    heads = [name for name in groups if "mtp.layers." in name]
    assert heads and {name for name, group in groups.items() if group == "mtp"} == set(heads)


def test_a_norm_over_the_threshold_updates_nothing(make_fsdp):
    training = make_fsdp(grad_norm_skip_threshold=2.0)
    before = whole(training)
    assert train(training, range(2)) == [None, None]
    assert_same(whole(training), before, rtol=0, atol=0)


@pytest.mark.parametrize("chained", [False, True])
def test_zeros_are_counted_with_a_rank_that_owns_nothing(make_fsdp, rank, chained):
    """Precision-aware with fp8 other than delayed scaling, where upstream asks the first parameter."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    training = make_fsdp(fp8_recipe="blockwise")
    if rank == 0:
        training.optimizer.optimizer.param_groups.clear()
    backward(training, 0)
    mine = sum(int((gradient(p) == 0).sum()) for p in training.optimizer.get_parameters() if gradient(p) is not None)
    total = torch.tensor(mine)
    dist.all_reduce(total)
    optimizer = ChainedOptimizer([training.optimizer]) if chained else training.optimizer
    assert optimizer.count_zeros() == int(total)


def test_zeros_of_a_chain_over_different_ranks_with_a_rank_that_owns_nothing(make_fsdp, rank, world_size):
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    training = make_fsdp(fp8_recipe="blockwise")
    params = [torch.nn.Parameter(torch.ones(4))] if rank else []
    for param in params:
        param.grad, param.tensor_model_parallel = torch.zeros(4), True
    adam = torch.optim.AdamW([{"params": params}], lr=LR)
    other = FP32Optimizer(adam, training.optimizer.config, lambda *args: None)
    other.grad_stats_parallel_group = dist.new_group(list(range(world_size)))
    if rank == 0:
        training.optimizer.optimizer.param_groups.clear()
    backward(training, 0)
    alone = training.optimizer.count_zeros()
    assert ChainedOptimizer([training.optimizer, other]).count_zeros() == alone + 4 * (world_size - 1)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, moments",
    [("optim", torch.float32), ("optim_grads", torch.bfloat16), ("optim_grads_params", torch.float32)],
    ids=str,
)
def test_the_optimizer_s_state_is_two_moments_and_nothing_else(make_fsdp, strategy, moments):
    from tests.trainings.optimizer_state import shard_elements, state_bytes

    training = make_fsdp(strategy, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    train(training, range(2))
    elements = shard_elements(training.optimizer)
    assert state_bytes(training.optimizer) == 2 * moments.itemsize * elements
    total = torch.tensor(elements)
    dist.all_reduce(total)
    assert int(total) == sum(param.numel() for param in make_net(torch.float32).parameters())


@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
def test_no_setting_of_fused_adam_speaks_of_master_weights(make_fsdp, recipe):
    """With fp8 other than delayed scaling Megatron itself asks for none, and for gradients in `grad`."""
    training = make_fsdp(fp8_recipe=recipe)
    assert train(training, range(2)) == about(Reference(torch.bfloat16).train(range(2)))
    fused_adam = training.optimizer.optimizer
    assert (fused_adam.master_weights, fused_adam.store_param_remainders) == (False, False)
    assert fused_adam.use_decoupled_grad is True


def test_an_optimizer_that_reads_grad_still_gets_it(make_fsdp):
    training = make_fsdp(use_precision_aware_optimizer=False)
    reference = Reference(torch.bfloat16)
    assert train(training, range(3)) == about(reference.train(range(3)))
