"""What attention and its position embeddings are told that Megatron does not tell them."""

import argparse
import importlib
from pkgutil import resolve_name

import pytest
import torch

pytestmark = pytest.mark.forked("patched")


@pytest.mark.parametrize(
    "attention",
    [
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention",
    ],
)
def test_learnable_sinks_are_a_shard(attention):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    if ":TE" in attention:
        pytest.importorskip("transformer_engine", reason="its attention")
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, softmax_type="learnable")
    sinks = resolve_name(attention)(config, 1, AttnMaskType.causal, "self").softmax_offset
    assert sinks.tensor_model_parallel and (sinks.partition_dim, sinks.partition_stride) == (0, 1)


def test_the_factor_of_the_command_line_is_that_of_the_configuration():
    pytest.importorskip("megatron.training", reason="not in the wheel of 0.16.1")
    utils = importlib.import_module("megatron.training.argument_utils")
    if not hasattr(utils, "gpt_config_from_args"):
        pytest.skip("before 0.19 GPTModel is given the factor")
    arguments = importlib.import_module("megatron.training.arguments")
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 32"
    flags += " --use-rope-scaling --rope-scaling-factor 32"
    parsed = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    parsed.params_dtype, parsed.swiglu, parsed.group_query_attention = torch.float32, False, False
    assert utils.gpt_config_from_args(parsed).rope_scaling_factor == 32.0
