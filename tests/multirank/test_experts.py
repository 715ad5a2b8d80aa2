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


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("splits", ["column", "row"])
def test_a_layer_that_moe_layer_has_not_built_is_marked_and_its_replicas_train_alike(
    parallel, rank, world_size, splits
):
    """NVIDIA/Megatron-LM#5916 marks in the linear layers: adapters, and experts of other libraries."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    state = parallel(tensor_model_parallel_size=2, expert_model_parallel_size=1, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        num_moe_experts=2,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        calculate_per_token_loss=True,
        perform_initialization=False,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    more = {"gather_output": False} if splits == "column" else {"input_is_parallel": True, "skip_bias_add": False}
    layer = getattr(layers, f"{splits.capitalize()}ParallelLinear")(
        8,
        16,
        config=config,
        init_method=config.init_method,
        bias=False,
        is_expert=True,
        tp_group=state.get_expert_tensor_parallel_group(),
        **more,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
    for param in model.parameters():
        assert param.tensor_model_parallel and param.partition_dim == (splits == "row")
        assert not param.allreduce
        param.main_grad.fill_(2.0**rank)
    model.finish_grad_sync()
    assert all((param.main_grad == 2.0**world_size - 1).all() for param in model.parameters())
