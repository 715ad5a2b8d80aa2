"""Megatron-Bridge's gpt_step: the loss mask of a batch reaches the MTP loss of the model."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.scoped import scoped

# The loss masks of the batches that a forward step has read, [b, s of this context-parallel rank].
_masks: ContextVar[list[Any]] = ContextVar("masks")


def note_loss_mask(call: Call) -> Any:
    """Wraps get_batch, which returns tokens, labels, loss_mask and others; all None where the stage reads no batch."""
    return _note_mask(call.proceed())


def _note_mask(batch: Any) -> Any:
    masks = _masks.get(None)
    if masks is not None:
        masks.append(batch[2])
    return batch


def pass_loss_mask(call: Call) -> Any:
    """Wraps _forward_step_common(..., model, ..., _get_batch_fn), which calls the model without the loss mask.

    DeepSeek-V4's step has a `_get_batch_fn` of its own.
    """
    model = call["model"]
    if not getattr(get_model_config(model), "mtp_num_layers", None):
        return call.proceed()
    own_get_batch = call.get("_get_batch_fn")
    if own_get_batch is not None:
        call["_get_batch_fn"] = lambda *args, **kwargs: _note_mask(own_get_batch(*args, **kwargs))

    def add_mask(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {"loss_mask": masks[-1], **kwargs} if masks else kwargs

    with scoped(_masks, []) as masks, model.register_forward_pre_hook(add_mask, with_kwargs=True):
        return call.proceed()
