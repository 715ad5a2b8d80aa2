"""A model as Megatron's functions take it: a module or the list of its chunks, each in the wrappers of training."""

from __future__ import annotations

import re
from typing import Any


def as_list(model: Any) -> Any:
    """Return the chunks of a model, which may be one module."""
    return model if isinstance(model, (list, tuple)) else [model]


def plain_name(name: str) -> str:
    """A name of model.named_parameters() without what DDP and Float16Module put before it."""
    return re.sub(r"^(module\.)+", "", name)


def is_megatron_fsdp(chunk: Any) -> bool:
    """True if `chunk` is a model in Megatron-FSDP. Its version 2, of main, manages gradients in another way."""
    ddp_config = getattr(chunk, "ddp_config", None)  # of a chunk that nothing wraps there is none
    return getattr(ddp_config, "use_megatron_fsdp", False) and hasattr(chunk, "param_and_grad_buffer")
