"""Train the MTP heads alone: `config.freeze_base_model_for_mtp`.

NVIDIA/Megatron-LM#7021, by its description; #4785 (`--freeze-base-for-mtp` of megatron.post_training, 0.19) lets the
same parameters train. The main model runs without gradients and keeps no activations. The heads are detached as by
`config.mtp_detach_heads`. Their loss is attached to the output of the model instead of the hidden states of the main
model, so the backward pass does not go through the output layer and the main loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch.nn.modules.batchnorm import _NormBase

P = ParamSpec("P")
R = TypeVar("R")

# The losses of the heads in the forward pass that is running, where the main model is frozen.
losses_of_heads: ContextVar[list[torch.Tensor] | None] = ContextVar("losses to attach to the output", default=None)


def heads_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the MTP blocks in some modules; the heads of Megatron's models are all in these blocks."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    for module in modules:
        yield from (child for child in module.modules() if isinstance(child, MultiTokenPredictionBlock))


def freeze(model: torch.nn.Module) -> None:
    """Let only the parameters of the heads require gradients, and keep the main model's running statistics."""
    heads = {module for block in heads_of([model]) for module in block.modules()}
    for module in model.modules():
        if module in heads:
            continue
        for param in module.parameters(recurse=False):
            param.requires_grad_(False)
        if isinstance(module, _NormBase):
            module.track_running_stats = False


def is_training_heads() -> bool:
    """Whether a forward pass is running in which heads train and the main model is frozen."""
    return losses_of_heads.get() is not None


def with_gradients_of_heads(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that records gradients also inside `run_main_model_without_gradients`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.set_grad_enabled(torch.is_grad_enabled() or is_training_heads()):
            return function(*args, **kwargs)

    return call


def attach_loss(main: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return `main`, the hidden states [s, b, h] of the main model, whose backward pass trains the heads by `loss`.

    Where the main model is frozen, the output of the model does so instead, and `main` is returned detached.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    losses = losses_of_heads.get()
    if losses is None:
        return MTPLossAutoScaler.apply(main, loss)
    losses.append(loss)
    return main.detach()
