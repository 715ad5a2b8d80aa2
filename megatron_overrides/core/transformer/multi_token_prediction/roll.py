"""Let roll_tensor accept None."""

from __future__ import annotations

from typing import Any


def roll_nothing(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Wraps roll_tensor(tensor, ...), which returns (tensor, sum): for a mask or labels that are None, (None, None)."""
    tensor = args[0] if args else kwargs["tensor"]
    return (None, None) if tensor is None else wrapped(*args, **kwargs)
