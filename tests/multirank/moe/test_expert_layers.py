"""A linear layer of an expert that no MoELayer built trains as the experts of a MoELayer do (#5916)."""

from pkgutil import resolve_name

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-experts-in-grad-norm"), pytest.mark.ranks(4)]

# (TP, ETP): two ranks hold replicas of an expert, or its shards while each holds whole dense layers.
SIZES = [(2, 1), (1, 2)]
LAYERS = ["native", "transformer engine", "grouped"]
ON_THE_CPU = " on the CPU"
# The second replaces its bias where weights are initialized on the CPU; the third is for other libraries' layers.
MORE_LAYERS = ["native on the CPU", "transformer engine on the CPU", "TELinear"]
CLASSES = {
    ("native", "column"): "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
    ("native", "row"): "megatron.core.tensor_parallel.layers:RowParallelLinear",
    ("transformer engine", "column"): "megatron.core.extensions.transformer_engine:TEColumnParallelLinear",
    ("transformer engine", "row"): "megatron.core.extensions.transformer_engine:TERowParallelLinear",
    ("grouped", "column"): "megatron.core.extensions.transformer_engine:TEColumnParallelGroupedLinear",
    ("grouped", "row"): "megatron.core.extensions.transformer_engine:TERowParallelGroupedLinear",
    ("TELinear", "column"): "megatron.core.extensions.transformer_engine:TELinear",
    ("TELinear", "row"): "megatron.core.extensions.transformer_engine:TELinear",
}


@pytest.fixture
def make_layer(parallel):
    """make_layer(kind, direction, (TP, ETP), bias): the config and a layer of experts that stands alone."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    def make(kind, direction, sizes, bias=False):
        if "native" not in kind:
            pytest.importorskip("transformer_engine", reason="its layers")
        tensor, expert_tensor = sizes
        state = parallel(
            tensor_model_parallel_size=tensor, expert_model_parallel_size=1, expert_tensor_parallel_size=expert_tensor
        )
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=4,
            num_moe_experts=2,
            moe_ffn_hidden_size=16,
            tensor_model_parallel_size=tensor,
            expert_tensor_parallel_size=expert_tensor,
            calculate_per_token_loss=True,  # DDP adds the gradients up
            gradient_accumulation_fusion=False,
            add_bias_linear=False,
            use_cpu_initialization=kind.endswith(ON_THE_CPU),
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        if kind == "grouped":
            more = {"num_gemms": 2, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
        else:
            more = {"tp_group": state.get_expert_tensor_parallel_group()}
        if kind == "TELinear":
            more |= {"parallel_mode": direction, "skip_weight_param_allocation": False}
        elif kind != "grouped":
            more |= {"gather_output": False} if direction == "column" else {"input_is_parallel": True}
        make_linear = resolve_name(CLASSES[kind.removesuffix(ON_THE_CPU), direction])
        layer = make_linear(
            input_size=8,
            output_size=16,
            config=config,
            init_method=config.init_method,
            bias=bias,
            skip_bias_add=False,
            is_expert=True,
            **more,
        )
        return config, layer

    return make


@pytest.mark.parametrize("sizes", SIZES, ids=["replicas", "shards"])
@pytest.mark.parametrize("kind", LAYERS)
def test_its_gradient_is_that_of_all_replicas(make_layer, kind, sizes, rank):
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config, layer = make_layer(kind, "column", sizes)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
    for param in model.parameters():
        param.main_grad.fill_(2.0**rank)
    model.finish_grad_sync()
    replicas = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
    for param in model.parameters():
        assert param.main_grad.unique().tolist() == [sum(2.0**replica for replica in replicas)]


@pytest.mark.parametrize("direction", ["column", "row"])
@pytest.mark.parametrize("kind", LAYERS + MORE_LAYERS)
def test_its_parameters_are_marked_as_shards_and_replicas(make_layer, kind, direction):
    _, layer = make_layer(kind, direction, (2, 1), bias=True)
    marks = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}[direction]
    params = dict(layer.named_parameters())
    assert params
    for name, param in params.items():
        dimension = marks.get(name.rstrip("0123456789"))
        assert param.allreduce is False
        assert bool(getattr(param, "tensor_model_parallel", False)) is (dimension is not None)
        if dimension is not None:
            assert (param.partition_dim, param.partition_stride) == (dimension, 1)
