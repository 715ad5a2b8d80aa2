"""With PP2 the last stage's copy of the word embedding is an embedding to the optimizers, as on the first stage."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.ranks(2)]


@pytest.fixture
def stage(parallel):
    """This rank's stage of a two-stage GPT with untied embeddings and one MTP head, on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    return GPTModel(
        config,
        layer,
        vocab_size=32,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
    )


def test_every_copy_of_the_word_embedding_trains_at_the_decoupled_learning_rate(stage):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    weight = stage.embedding.word_embeddings.weight
    assert weight.is_embedding_or_output_parameter
    config = OptimizerConfig(optimizer="adam", lr=1.0, decoupled_lr=0.25, decoupled_min_lr=0.0, min_lr=0.0)
    model = DistributedDataParallel(stage.config, DistributedDataParallelConfig(), stage)
    optimizer = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    (group,) = (group for group in optimizer.param_groups if any(param is weight for param in group["params"]))
    assert group["max_lr"] == 0.25
    assert any(group["max_lr"] == 1.0 for group in optimizer.param_groups)
