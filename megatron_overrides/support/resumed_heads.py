"""Refuse the optimizer state of a run in which `--freeze-base-model-for-mtp` was set otherwise.

It has the moments of other parameters. Depending on the optimizer Megatron loads some of it and trains on, or ends in a
KeyError of thousands of names or a mismatch of shapes.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from megatron_overrides.core.transformer.transformer_config import is_main_model_frozen

# Whether load_checkpoint is running for a model with an optimizer. Others read checkpoints by the same function.
_loads_optimizer: ContextVar[bool] = ContextVar("load_checkpoint has an optimizer", default=False)


def watch_for_other_state(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps load_checkpoint(ddp_model, optimizer, ...)."""
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    token = _loads_optimizer.set(given.get("optimizer") is not None)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _loads_optimizer.reset(token)


def refuse_other_state(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps _load_base_checkpoint(load_dir, args, ...), which returns (state dict or None, name, is a release, ...).

    In the format torch_dist load_checkpoint calls it twice: first for what is the same on all ranks, these arguments
    among it, and then for the tensors.

    Raises:
        ValueError: the arguments in the checkpoint say that other parameters were trained, and its optimizer state is
            about to be loaded.
    """
    result = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    settings = given["args"]
    state, _, is_release, *_ = result
    saved = (state or {}).get("args")
    if not _loads_optimizer.get() or is_release or settings.finetune or settings.no_load_optim or saved is None:
        return result
    if is_main_model_frozen(saved) and not is_main_model_frozen(settings):
        raise ValueError(
            f"The checkpoint in {given['load_dir']} is of a run with --freeze-base-model-for-mtp, so it has the "
            f"optimizer state of the MTP heads alone: add --freeze-base-model-for-mtp to train them further or, to "
            f"train the whole model, --finetune (from iteration 0) or --no-load-optim"
        )
    if is_main_model_frozen(settings) and not is_main_model_frozen(saved):
        raise ValueError(
            f"The checkpoint in {given['load_dir']} is of a run without --freeze-base-model-for-mtp, so it has the "
            f"optimizer state of the whole model: to train the MTP heads alone, add --finetune (from iteration 0) or "
            f"--no-load-optim, or --mtp-init if it has no heads; to train the whole model further, leave "
            f"--freeze-base-model-for-mtp out"
        )
    return result
