"""The first step of a GPT with untied embeddings and an MTP head on two pipeline stages, with --decoupled-lr: the
learning rates with which the first and the last stage train their copies of the word embedding.
"""

from ...defects.labs.lab import gather, make_config, make_ddp, make_gpt, start

RANKS = 2


def reproduce():
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    start(pipeline_model_parallel_size=2)
    config = make_config(mtp_num_layers=1, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = make_ddp(config, make_gpt(config))
    settings = OptimizerConfig(optimizer="adam", lr=1.0, min_lr=0.0, decoupled_lr=0.25, decoupled_min_lr=0.0)
    optimizer = get_megatron_optimizer(settings, [model], get_standard_config_overrides(settings))
    weight = model.module.embedding.word_embeddings.weight
    (rate,) = (group["max_lr"] for group in optimizer.param_groups if any(param is weight for param in group["params"]))
    return [0.25, 0.25], gather(rate)
