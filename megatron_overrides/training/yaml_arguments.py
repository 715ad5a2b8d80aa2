"""A YAML configuration written for the release goes on working with our fields in it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def default_added_fields(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Wraps core_config_from_args(args, dataclass), to which a field that the YAML does not name is an error."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    arguments, config_class = call.args
    for field in dataclasses.fields(config_class):
        if field.metadata.get("added_in_place") and not hasattr(arguments, field.name):
            setattr(arguments, field.name, field.default)
    return wrapped(*call.args)
