"""Full activation recomputation of an MTP layer with a padding mask; 0.18 raises TypeError."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


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
