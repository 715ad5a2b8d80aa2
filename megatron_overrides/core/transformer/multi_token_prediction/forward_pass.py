"""What a model's forward pass knows and its MTP loss needs: the tokens, and whether anything will be trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class ForwardPass(NamedTuple):
    """`is_idle`: the MTP block was left out, so that its hidden states are missing from what it returned."""

    input_ids: torch.Tensor | None = None
    is_idle: bool = False


_OUTSIDE = ForwardPass()
_current: ContextVar[ForwardPass] = ContextVar("the forward pass of the model", default=_OUTSIDE)


def current() -> ForwardPass:
    return _current.get()


def tell_tokens(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps GPTModel._postprocess, HybridModel.forward and MambaModel.forward.

    Without gradients nothing of MTP is of use (evaluation, log probabilities of an RL policy). It can be left out
    where the block and the loss are in this same call; otherwise the next stage expects the block's output.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    has_both = instance.post_process and getattr(instance, "mtp_process", False)
    with _during(ForwardPass(call.get("input_ids"), is_idle=bool(has_both and not torch.is_grad_enabled()))):
        return wrapped(*args, **kwargs)


def leave_out_idle_block(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward."""
    if current().is_idle:
        return inspect.signature(wrapped).bind(*args, **kwargs).arguments["hidden_states"]
    return wrapped(*args, **kwargs)


@contextmanager
def _during(forward_pass: ForwardPass) -> Iterator[None]:
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)
