"""The wrappers around MTP layers that recompute their activations.

NVIDIA/Megatron-LM#6760 and #4593: full recomputation in fp8 or fp4 by the layer's own tensor-parallel group; up to 0.17
TransformerEngine's checkpoint gave no gradient to tensors passed by keyword, and Megatron's cannot save packed
sequences.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call


def checkpoint_layer(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionLayer._checkpointed_forward: takes keywords, and up to 0.17 the function to run."""
    config = call.instance.config
    if config.recompute_method != "uniform" or config.recompute_num_layers != 1:
        return call.proceed()
    function = call.args[0] if call.args else call.instance._proj_and_transformer_layer
    names = [name for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in call.kwargs.items() if name not in names}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return function(**others, **dict(zip(names, tensors, strict=True)))

    tensors = [call.kwargs[name] for name in names]
    if config.fp8 or config.fp4:
        from megatron_overrides.mtp.heads.quantized_recompute import checkpoint_quantized

        return checkpoint_quantized(call.instance, run, tensors)
    if call.args and any(value is not None for value in others.values()):
        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(run, config.distribute_saved_activations, *tensors)
    return call.proceed()


def accept_padding_mask(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer._checkpointed_forward.

    0.18 calls it with a `padding_mask`, which it does not accept: every MTP model with full recomputation raises
    TypeError. Upstream fixed this in NVIDIA/Megatron-LM#3457.
    """
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in call.parameters.values())
    if "padding_mask" not in call.kwargs or "padding_mask" in call.parameters or accepts_any:
        return call.proceed()
    layer = _LayerWithPaddingMask(call.instance, call.kwargs.pop("padding_mask"))
    return call.proceed(layer)


class _LayerWithPaddingMask:
    """Stands for the layer in a method that drops the mask, and adds it: in forward, and when backward recomputes."""

    def __init__(self, layer: Any, padding_mask: Any) -> None:
        self._layer = layer
        self._padding_mask = padding_mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def _proj_and_transformer_layer(self, **kwargs: Any) -> Any:
        return self._layer._proj_and_transformer_layer(padding_mask=self._padding_mask, **kwargs)
