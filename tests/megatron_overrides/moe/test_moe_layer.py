"""The parameters of experts are marked as shards or replicas, whichever layers the experts are made of."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-experts-in-grad-norm")]

SHARDS = {"linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1}


@pytest.fixture
def experts(make_gpt):
    """experts(**sizes): the parameters of the experts of a GPT that is split over so many ranks, by name."""

    def make(**sizes):
        model = make_gpt(32, 8, num_moe_experts=4, moe_ffn_hidden_size=16, **sizes)
        return {name: param for name, param in model.named_parameters() if ".experts." in name}

    return make


def test_shards_and_replicas_of_sequential_experts(experts):
    params = experts()
    assert len(params) == 4 * 4 * 4  # two layers and two MTP heads
    for name, param in params.items():
        kind = ".".join(name.split(".")[-2:])
        assert bool(param.tensor_model_parallel) is (kind in SHARDS), name
        assert kind not in SHARDS or (param.partition_dim, param.partition_stride) == (SHARDS[kind], 1)


@pytest.mark.parametrize(
    "sizes, together",
    [
        ({}, True),
        ({"expert_model_parallel_size": 2}, False),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, False),
    ],
)
def test_gradients_are_reduced_with_those_of_dense_layers_only_where_the_same_ranks_hold_replicas(
    experts, sizes, together
):
    assert {param.allreduce for param in experts(add_bias_linear=False, **sizes).values()} == {together}


def test_experts_with_weights_but_no_linear_layer_are_marked(monkeypatch, make_gpt):
    """GroupedMLP of 0.16.1. Its kernels are not called here, and need not be installed."""
    grouped_gemm_util = pytest.importorskip(
        "megatron.core.transformer.moe.grouped_gemm_util", reason="later releases have no GroupedMLP"
    )
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import experts

    monkeypatch.setattr(grouped_gemm_util, "assert_grouped_gemm_is_available", lambda: None)
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    config = make_gpt(32, 8, num_moe_experts=4, add_bias_linear=False, moe_ffn_hidden_size=16, **sizes).config
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=True)
    layer = spec.module(config, submodules=spec.submodules)
    assert isinstance(layer.experts, experts.GroupedMLP)
    assert [param.allreduce for param in layer.experts.parameters()] == [False, False]
