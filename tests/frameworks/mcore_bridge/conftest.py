"""mcore-bridge's own models on one and two ranks."""

import pytest

from ...multirank.conftest import from_all_ranks, parallel, process_group, world_size  # noqa: F401

VOCABULARY, LENGTH, BATCH = 64, 16, 2


@pytest.fixture
def make_config(parallel, world_size):  # noqa: F811
    """make_config(**settings): that of two small layers of its own, tensor-parallel over all ranks."""
    import torch
    from mcore_bridge import ModelConfig
    from megatron.core import tensor_parallel

    parallel(tensor_model_parallel_size=world_size)

    def make(**settings):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(0)
        return ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=64,
            padded_vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            normalization="RMSNorm",
            mcore_model_type="gpt",
            perform_initialization=True,
            tensor_model_parallel_size=world_size,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            **settings,
        )

    return make


@pytest.fixture
def make_model(make_config):
    """make_model(model_class=GPTModel, **settings): its model with two heads, tensor-parallel over all ranks."""
    from mcore_bridge.model.gpt_model import GPTModel
    from mcore_bridge.model.modules.mtp_layer import MultiTokenPredictionLayer
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    def make(model_class=GPTModel, **settings):
        defaults = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 1.0, "untie_embeddings_and_output_weights": True}
        config = make_config(**(defaults | settings))
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)
        heads = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=True)
        for spec in heads.layer_specs if heads else ():
            spec.module = MultiTokenPredictionLayer
        return model_class(config, layers, mtp_block_spec=heads)

    return make


@pytest.fixture(autouse=True)
def fresh_tracker():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    yield
    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def batch():
    import torch

    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool(),
        "labels": tokens[:, 1:].contiguous(),
    }


@pytest.fixture
def train(make_model, batch):
    """train(labels=None, loss_mask=None, **settings): gradients by name, and Megatron's tracker, of a pass."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def run(labels=None, loss_mask=None, **settings):
        model = make_model(**settings)
        MTPLossLoggingHelper.tracker.clear()
        targets = batch["labels"] if labels is None else labels
        model(**{**batch, "labels": targets, "loss_mask": loss_mask}).mean().backward()
        gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        return gradients, dict(MTPLossLoggingHelper.tracker)

    return run
