"""With PP2 the last stage's copy of the word embedding is an embedding to the optimizers, as on the first stage."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("tag-mtp-stage-embedding"), pytest.mark.ranks(2)]


@pytest.fixture
def stage(parallel):
    """This rank's stage of a two-stage GPT with untied embeddings and one MTP head, on the last stage."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scripts.tiny_gpt import build_gpt, make_config

    parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    config = make_config(
        hidden_size=16,
        num_attention_heads=2,
        mtp_num_layers=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    return build_gpt(config, vocabulary=32, length=8, tied=False)


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
