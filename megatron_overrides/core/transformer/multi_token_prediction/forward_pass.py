"""What a model's forward pass knows and its MTP loss needs: the tokens, and whether anything will be trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class ForwardPass(NamedTuple):
    """`trains`: there are gradients, or somebody else looks at the heads. `is_idle`: the MTP block is left out, and its
    hidden states are missing.
    """

    input_ids: torch.Tensor | None = None
    trains: bool = True
    is_idle: bool = False


_OUTSIDE = ForwardPass()
_current: ContextVar[ForwardPass] = ContextVar("the forward pass of the model", default=_OUTSIDE)


def current() -> ForwardPass:
    return _current.get()


def tell_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps GPTModel._postprocess, HybridModel.forward and MambaModel.forward.

    Without gradients nothing of MTP is of use (evaluation, log probabilities of an RL policy), unless modelopt looks at
    it. It can be left out where the block and the loss are in this same call; otherwise the next stage expects the
    block's output.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    runs_block = getattr(instance, "mtp_process", False) and call.arguments.get("mtp_in_postprocess", True)
    trains = torch.is_grad_enabled() or bool(runs_block and _modelopt_looks_at(instance.mtp))
    is_idle = bool(instance.post_process and runs_block and not trains)
    with _during(ForwardPass(call.arguments.get("input_ids"), trains, is_idle)):
        return wrapped(*args, **kwargs)


def leave_out_idle_block(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward."""
    if current().is_idle:
        return inspect.signature(wrapped).bind(*args, **kwargs).arguments["hidden_states"]
    return wrapped(*args, **kwargs)


def _modelopt_looks_at(block: torch.nn.Module) -> bool:
    """Whether quantizers or hooks of nvidia-modelopt are in the block.

    It calibrates quantizers, ranks channels and runs a teacher without gradients: heads that do not run would be left
    without ranges, ranks and outputs.
    """
    return any(
        getattr(part, "__module__", "").startswith("modelopt.")
        for module in block.modules()
        for part in (type(module), *module._forward_hooks.values())
    )


@contextmanager
def _during(forward_pass: ForwardPass) -> Iterator[None]:
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)
