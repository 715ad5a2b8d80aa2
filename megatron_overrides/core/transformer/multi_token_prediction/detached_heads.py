"""Keep the gradient of the MTP loss in the MTP heads: `config.mtp_detach_heads`.

NVIDIA/Megatron-LM#3456. The gradient can leave the heads in three ways: through the hidden states of the main model,
through the shared embedding (this file blocks both), and through the output layer (detached_output.py blocks it).
Deeper heads still train the heads before them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

# Attributes of an MTP layer. The first is set for one forward, the second for good.
_TAKES_MAIN_HIDDEN_STATES = "_takes_hidden_states_of_main_model"
_REPORTS_ZERO_EMBEDDING_GRAD = "_reports_zero_gradient_of_embedding"


def detach_block(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: marks the first layer, whose input comes from the main model."""
    if instance.config.mtp_detach_heads:
        setattr(instance.layers[0], _TAKES_MAIN_HIDDEN_STATES, True)
    return wrapped(*args, **kwargs)


def detach_scheduled_layer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps build_mtp_layer_callables(layer), whose nodes (1F1B overlap of experts) never call the block.

    Upstream detaches in the block only. With --overlap-moe-expert-parallel-comm its MTP loss trains the main model.
    """
    (first, *others), backward = wrapped(*args, **kwargs)
    layer = inspect.signature(wrapped).bind(*args, **kwargs).arguments["layer"]

    def forward(node: Any, hidden_states: torch.Tensor) -> Any:
        if layer.config.mtp_detach_heads and node.is_first_layer:
            setattr(layer, _TAKES_MAIN_HIDDEN_STATES, True)
        return first(node, hidden_states)

    return [forward, *others], backward


def detach_inputs(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Wraps MultiTokenPredictionLayer._get_embeddings, which returns (..., embedded tokens, hidden states)."""
    if not instance.config.mtp_detach_heads:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    takes_main_hidden_states = vars(instance).pop(_TAKES_MAIN_HIDDEN_STATES, False)
    if takes_main_hidden_states:
        call.arguments["hidden_states"] = call.arguments["hidden_states"].detach()
    *rest, embedded, hidden_states = wrapped(*call.args, **call.kwargs)
    embedded = embedded.detach()
    if takes_main_hidden_states and getattr(instance, _REPORTS_ZERO_EMBEDDING_GRAD, False):
        embedded = _report_zero_gradient(embedded, call.arguments["embedding"])
    if not hidden_states.requires_grad:
        # Activation recomputation gives gradients to parameters only if one of its inputs requires a gradient.
        hidden_states.requires_grad_(True)
    return (*rest, embedded, hidden_states)


def wait_for_embedding(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps DistributedDataParallel.__init__(config, ddp_config, module, ...): marks layers that must report a zero.

    With --overlap-grad-reduce DDP asserts, after the first step, that each parameter of a bucket has had a gradient.
    The MTP stage's copy of the embedding gets none from detached heads. The distributed optimizer gives the copy a
    separate bucket, unless buckets of fp8 and bf16 parameters are joined.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    config, ddp = given["config"], given["ddp_config"]
    separate_bucket = ddp.use_distributed_optimizer and not getattr(ddp, "fp8_param_gather", False)
    if ddp.overlap_grad_reduce and not separate_bucket and getattr(config, "pipeline_model_parallel_size", 1) > 1:
        for module in given["module"].modules():
            if isinstance(module, MultiTokenPredictionLayer):
                setattr(module, _REPORTS_ZERO_EMBEDDING_GRAD, True)


def _report_zero_gradient(embedded: torch.Tensor, embedding: Callable[..., Any]) -> torch.Tensor:
    """Give the MTP stage's copy of the embedding a gradient of zero; see wait_for_embedding.

    The copy must still require a gradient, because the gradient of the first stage is added to it.
    """
    parameters = [p for p in embedding.parameters() if p.requires_grad] if hasattr(embedding, "parameters") else []
    return _ZeroGradient.apply(embedded, *parameters)


class _ZeroGradient(torch.autograd.Function):
    """Returns its first argument; the other arguments get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return (None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))
