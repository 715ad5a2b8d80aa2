"""A model whose largest attention logits are set, and its clipped weights, for reproductions of QK clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lab import make_config, make_ddp, make_gpt, run_microbatches

THRESHOLD = 1.0


def make_clipping_model(transformer_engine: bool = False, **settings: Any) -> Any:
    """A bf16 GPT in the wrappers of training; a head is clipped if its largest logit is over THRESHOLD."""
    from megatron.core.transformer.module import Float16Module

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    config = make_config(qk_clip=True, qk_clip_threshold=THRESHOLD, qk_clip_alpha=0.5, **half, **settings)
    return make_ddp(config, Float16Module(config, make_gpt(config, transformer_engine)))


def attention_layers(model: Any) -> list[Any]:
    """The attention layers of the main model, then those of the MTP heads."""
    return [module for module in model.modules() if hasattr(module, "core_attention")]


def set_largest_logits(model: Any, *logits: float) -> None:
    """Let each layer have had these largest logits since the last step, one for each of the four heads of this rank."""
    for layer in attention_layers(model):
        layer.core_attention.current_max_attn_logits = torch.tensor(logits)


def clip(model: Any, log_max_only: bool = False) -> float:
    """Clip as Megatron's trainer does after a step; the largest logit."""
    from megatron.core.optimizer.qk_clip import clip_qk

    return clip_qk([model], log_max_only)


def largest_logits_of_step(model: Any, before: Callable[[], None]) -> tuple[float, float]:
    """The largest logit of a step: where nothing ran before it, and where `before` did.

    The layers are TransformerEngine's, whose attention reports its largest logits.
    """
    before()
    maxima = []
    for _ in range(2):
        run_microbatches(model, 1)
        maxima.append(clip(model, log_max_only=True))
        for layer in attention_layers(model):
            layer.core_attention.current_max_attn_logits = None
    return maxima[1], maxima[0]


def multiply_weights(model: Any, factor: float) -> None:
    """Multiply the weights of queries, keys and values."""
    for layer in attention_layers(model):
        layer.linear_qkv.weight.data.mul_(factor)
