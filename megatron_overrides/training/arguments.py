"""Checks of Megatron's arguments, before a model is built."""

from __future__ import annotations

from typing import Any

from megatron_overrides.core.optimizer.optimizer_config import check_skip_threshold


def check_arguments(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps validate_args(args, defaults)."""
    check_skip_threshold(args[0] if args else kwargs["args"])
    return wrapped(*args, **kwargs)
