"""Keep the gradient of the MTP loss in the MTP heads: `config.mtp_detach_heads`.

NVIDIA/Megatron-LM#3456. The gradient can leave the heads in three ways: through the hidden states of the main model,
through the shared embedding (this file blocks both), and through the output layer (detached_output.py blocks it).
Deeper heads still train the heads before them. Under the 1F1B overlap of experts no block runs;
`detach_scheduled_layer` marks the layers there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.frozen.trained_parts import is_main_model_frozen

# Attributes of an MTP layer. The first is set for one forward, the second for good.
TAKES_MAIN_HIDDEN_STATES = "_takes_hidden_states_of_main_model"
REPORTS_ZERO_EMBEDDING_GRAD = "_reports_zero_gradient_of_embedding"


def are_detached(config: Any) -> bool:
    """True if no gradient of the MTP loss leaves the heads of a model with this TransformerConfig."""
    return bool(getattr(config, "mtp_detach_heads", False)) or is_main_model_frozen(config)


def report_zero_gradient(tensor: torch.Tensor, embedding: Callable[..., Any]) -> torch.Tensor:
    """Return `tensor`, whose backward also gives the MTP stage's copy of the embedding a gradient of zero.

    The copy must still require a gradient, because the gradient of the first stage is added to it. See
    distributed_data_parallel.py.
    """
    parameters = [p for p in embedding.parameters() if p.requires_grad] if hasattr(embedding, "parameters") else []
    return _ZeroGradient.apply(tensor, *parameters)


class _ZeroGradient(torch.autograd.Function):
    """Returns its first argument; the other arguments get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return tensor.detach()  # no view, which a pipeline stage could not send

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return (gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))


def detach_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: marks the first layer, whose input comes from the main model."""
    if are_detached(call.instance.config):
        setattr(call.instance.layers[0], TAKES_MAIN_HIDDEN_STATES, True)
    return call.proceed()


def detach_inputs(call: Call) -> tuple[Any, ...]:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which returns (..., embedded tokens, hidden states)."""
    if not are_detached(call.instance.config):
        return call.proceed()
    takes_main_hidden_states = vars(call.instance).pop(TAKES_MAIN_HIDDEN_STATES, False)
    if takes_main_hidden_states:
        call["hidden_states"] = call["hidden_states"].detach()
    *rest, embedded, hidden_states = call.proceed()
    embedded = embedded.detach()
    if takes_main_hidden_states and getattr(call.instance, REPORTS_ZERO_EMBEDDING_GRAD, False):
        embedded = report_zero_gradient(embedded, call["embedding"])
    if not hidden_states.requires_grad:
        # Activation recomputation gives gradients to parameters only if one of its inputs requires a gradient.
        hidden_states.requires_grad_(True)
    return (*rest, embedded, hidden_states)


def detach_scheduled_layer(call: Call) -> Any:
    """Wraps build_mtp_layer_callables(layer); upstream does not detach here, so its MTP loss trains the main model."""
    (first, *others), backward = call.proceed()
    layer = call["layer"]

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        if getattr(layer.config, "mtp_detach_heads", False) and node.is_first_layer:
            setattr(layer, TAKES_MAIN_HIDDEN_STATES, True)
        return first(node, hidden_states)

    return [forward, *others], backward
