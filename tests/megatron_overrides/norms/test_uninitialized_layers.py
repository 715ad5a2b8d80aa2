"""Layers that Megatron does not initialize (--no-initialization) mark their weights as shards, as the others do."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-uninitialized-shards")]


@pytest.mark.parametrize("is_initialized", [True, False])
@pytest.mark.parametrize(
    "name, dimension, split",
    [
        ("ColumnParallelLinear", 0, {"gather_output": False}),
        ("RowParallelLinear", 1, {"input_is_parallel": True, "skip_bias_add": False}),
    ],
)
def test_weights_of_linear_layers_are_shards(name, dimension, split, is_initialized):
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        perform_initialization=is_initialized,
        use_cpu_initialization=True,
    )
    layer = getattr(layers, name)(8, 8, config=config, init_method=torch.nn.init.zeros_, bias=False, **split)
    assert layer.weight.tensor_model_parallel
    assert (layer.weight.partition_dim, layer.weight.partition_stride) == (dimension, 1)
