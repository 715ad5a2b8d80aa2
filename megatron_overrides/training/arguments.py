"""Checks of Megatron's arguments, before a model is built."""

from __future__ import annotations

from typing import Any

from megatron_overrides.core.optimizer.optimizer_config import check_settings
from megatron_overrides.core.transformer.transformer_config import check_heads


def check_arguments(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps validate_args(args, defaults)."""
    settings = args[0] if args else kwargs["args"]
    check_settings(settings)
    check_heads(settings)
    _check_separate_clip(settings)
    return wrapped(*args, **kwargs)


def _check_separate_clip(settings: Any) -> None:
    if getattr(settings, "mtp_detach_heads", False) or getattr(settings, "separate_mtp_grad_clip", False):
        return
    for name in ("mtp_clip_grad", "mtp_grad_norm_skip_threshold"):
        if getattr(settings, name, None) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} needs MTP heads that are clipped on their own: add --mtp-detach-heads, "
                f"or --separate-mtp-grad-clip to keep training the trunk with the MTP loss"
            )
