"""A run says which patches it was made with."""

from __future__ import annotations

from typing import Any

from . import record


def record_in_arguments(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps validate_args: what is in Megatron's args reaches its log, TensorBoard, W&B and the checkpoint."""
    arguments = args[0] if args else kwargs["args"]
    arguments.megatron_mtp_patches = record()
    return wrapped(*args, **kwargs)


def record_in_bridge_configuration(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ConfigContainer.validate of Megatron-Bridge: it saves its configuration with each checkpoint."""
    instance.logger.megatron_mtp_patches = record()
    return wrapped(*args, **kwargs)
