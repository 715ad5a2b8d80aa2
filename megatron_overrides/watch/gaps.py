"""What a watch cannot check in a run, as it says at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_overrides.model_places import is_quantized
from megatron_overrides.watch.weights import Weight


def name_gaps(weights: Sequence[Weight], config: Any, model_config: Any, states_alone: int) -> Iterator[str]:
    """Yield what is not checked on this rank, each as a part of a sentence.

    Args:
        weights: of this rank.
        config: an OptimizerConfig.
        model_config: a TransformerConfig.
        states_alone: of how many weights this rank alone has what the optimizer keeps.
    """
    trained = sum(weight.trained is not None for weight in weights)
    if states_alone:
        yield f"copies of the optimizer's state of {states_alone} of {trained} weights, which no other rank has"
    if quantized := sum(is_quantized(weight.param) for weight in weights):
        yield f"{quantized} quantized weights, but what the optimizer keeps of them"
    elif model_config.qk_clip:
        yield "weights against their main weights, which --qk-clip scales apart"
    elif (config.bf16 or config.fp16) and any(one.trained and not one.has_main_weight() for one in weights):
        yield "weights against main weights that the optimizer's kernel keeps"
    if config.fp16:
        yield "gradients and their norm under fp16, which the loss scaler checks"
    elif not config.clip_grad > 0.0:
        yield "the gradient norm, as nothing is clipped"
