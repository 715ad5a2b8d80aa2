"""Megatron makes a command-line flag of every field of TransformerConfig; some fields are no words to type."""

from __future__ import annotations

from typing import Any


def exclude_callable_fields(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps ArgumentGroupFactory.__init__, whose callers list what to leave out: a Callable has no argparse type."""
    wrapped(*args, **kwargs)
    instance.exclude.add("mtp_grad_scale_func")
