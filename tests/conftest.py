"""Fixtures that tests of the applied patches share."""

from contextlib import contextmanager

import pytest

pytest_plugins = ["tests.warm.plugin", "tests.testing.tables"]


@pytest.fixture
def unpatched():
    """with unpatched(): Megatron is as it was before the patches."""
    import megatron_mtp_patches

    @contextmanager
    def revert():
        megatron_mtp_patches.revert()
        try:
            yield
        finally:
            megatron_mtp_patches.apply()

    return revert


@pytest.fixture
def make_gpt():
    """make_gpt(vocabulary, length, **config): this rank's stage of a seeded fp32 GPT with two MTP heads, no dropout.

    `tied` ties the embeddings; mtp_num_layers=None makes a model without heads. `scatters` is False for the language
    model of a multimodal one, whose embedding leaves the scatter for sequence parallelism to its caller. `vp_stage` is
    the chunk of an interleaved pipeline. `transformer_engine` makes layers of that.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    def make(vocabulary, length, tied=False, scatters=True, vp_stage=None, transformer_engine=False, **settings):
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11)
        settings = {
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "mtp_num_layers": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
        } | settings
        config = TransformerConfig(**settings)
        if transformer_engine:
            spec = get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
        else:
            spec = get_gpt_layer_local_spec(
                num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization=config.normalization
            )
        chunks = config.virtual_pipeline_model_parallel_size
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and not vp_stage
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and vp_stage in (None, (chunks or 1) - 1)
        heads = None
        if config.mtp_num_layers and (last or config.pipeline_model_parallel_layout):
            heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=transformer_engine, vp_stage=vp_stage)
        return GPTModel(
            config,
            spec,
            vocab_size=vocabulary,
            max_sequence_length=length,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            scatter_embedding_sequence_parallel=scatters,
            share_embeddings_and_output_weights=tied,
            mtp_block_spec=heads,
            vp_stage=vp_stage,
        )

    return make
