"""Code that reproductions of checkpoints share."""

from __future__ import annotations

import torch

from .lab import make_config, make_ddp, make_gpt, make_optimizer, start

WEIGHT = 1 + 1 / 512  # which has no place in bf16


def load_main_params(chunks: int) -> list[float]:
    """The greatest and the least main parameter of a model in bf16 that gets them from a checkpoint in fp32.

    Each weight of the checkpoint is `WEIGHT`. Two ranks have an expert each of each of the model's `chunks`.
    """
    start(expert_model_parallel_size=2)
    config = make_config(num_moe_experts=2, expert_model_parallel_size=2, add_bias_linear=False, bf16=True)
    checkpoint, parts = {}, []
    for chunk in range(chunks):
        model = make_gpt(config)
        weights = {name: torch.full_like(weight, WEIGHT) for name, weight in model.named_parameters()}
        model.load_state_dict(weights, strict=False)
        checkpoint["model" if chunks == 1 else f"model{chunk}"] = weights
        parts.append(make_ddp(config, model.bfloat16(), use_distributed_optimizer=True))
    optimizer = make_optimizer(*parts, bf16=True, use_distributed_optimizer=True)
    optimizer.reload_model_params(state_dict=checkpoint)
    shards = [param.detach().flatten() for group in optimizer.param_groups for param in group["params"]]
    main_params = torch.cat(shards).float()
    return [float(main_params.max()), float(main_params.min())]
