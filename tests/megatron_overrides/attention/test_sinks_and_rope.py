"""What attention and its position embeddings are told that Megatron does not tell them."""

import argparse
import importlib
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-attention-sinks", "pass-rope-scaling-factor")]


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
    pytest.importorskip("transformer_engine", reason="it fuses position embeddings, which the flags leave on")
    utils = importlib.import_module("megatron.training.argument_utils")
    if not hasattr(utils, "gpt_config_from_args"):
        pytest.skip("before 0.19 GPTModel is given the factor")
    arguments = importlib.import_module("megatron.training.arguments")
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 32"
    flags += " --use-rope-scaling --rope-scaling-factor 32"
    parsed = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    parsed.params_dtype, parsed.swiglu, parsed.group_query_attention = torch.float32, False, False
    assert utils.gpt_config_from_args(parsed).rope_scaling_factor == 32.0


@pytest.mark.parametrize(
    "passed, given",
    [
        ({}, (500000, 32.0)),
        ({"language_rotary_base": 10000}, (10000, 32.0)),
        ({"language_rope_scaling_factor": 8.0}, (500000, 8.0)),
    ],
)
def test_the_language_model_of_a_vlm_has_the_rotary_settings_that_the_script_does_not_pass(monkeypatch, passed, given):
    from megatron.core.models.multimodal import llava_model
    from megatron.core.transformer import TransformerConfig

    class Reached(Exception):
        pass

    def make(**settings):
        raise Reached(settings["rotary_base"], settings["rope_scaling_factor"])

    run = SimpleNamespace(rotary_base=500000, rope_scaling_factor=32.0)
    monkeypatch.setattr("megatron_overrides.attention.rope_settings.arguments_of_run", lambda: run)
    monkeypatch.setattr(llava_model, "GPTModel", make)
    monkeypatch.setattr(llava_model, "ProcessGroupCollection", SimpleNamespace(use_mpu_process_groups=lambda: None))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    settings = {name: None for name in ("language_transformer_layer_spec", "vision_transformer_layer_spec")}
    settings |= {"drop_vision_class_token": False, "vision_projection_layer_spec": None}
    settings |= {"language_vocab_size": 32, "language_max_sequence_length": 8, "language_rope_scaling": True}
    settings |= {
        f"{part}_config": config for part in ("language_transformer", "vision_transformer", "vision_projection")
    }
    with pytest.raises(Reached) as reached:
        llava_model.LLaVAModel(**settings, **passed)
    assert reached.value.args == given


@pytest.mark.parametrize("size, scale", [(None, 0.5), (4, 1.0)])
def test_the_schedule_that_overlaps_experts_gives_no_size_of_context_parallelism(monkeypatch, size, scale):
    from megatron.core import parallel_state
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron_mtp_patches.engine.call import Call

    from megatron_overrides.attention.indexer_loss import scale_indexer_loss

    def calculate(config, num_microbatches, cp_group_size=None):
        pass

    scales = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(dsa.DSAIndexerLossAutoScaler, "set_loss_scale", lambda scale: scales.append(float(scale)))
    config = SimpleNamespace(grad_scale_func=None, calculate_per_token_loss=False)
    config.experimental_attention_variant = "dsa"
    scale_indexer_loss(Call(calculate, None, (config, 4), {"cp_group_size": size}))
    assert scales == [scale]
