"""Keep the gradient of the MTP loss in the MTP heads: `config.mtp_detach_heads`.

NVIDIA/Megatron-LM#3456. The gradient can leave the heads in three ways: through the hidden states of the main model,
through the shared embedding (this file blocks both), and through the output layer (detached_output.py blocks it).
Deeper heads still train the heads before them. Under the 1F1B overlap of experts no block runs;
mtp/heads/wrappers.py marks the layers there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
