"""The shards and main copies of a parameter keep its norm group."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.support.norm_groups import tag, tag_of


def copy_grad_norm_tags(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source), called for every shard and main copy."""
    wrapped(*args, **kwargs)
    destination, source = inspect.signature(wrapped).bind(*args, **kwargs).args
    group = tag_of(source)
    if group is not None:
        tag(destination, group)
