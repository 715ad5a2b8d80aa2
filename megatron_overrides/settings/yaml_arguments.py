"""A YAML configuration written for the release goes on working with our fields in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_overrides.call import Call


def default_added_fields(call: Call) -> dict[str, Any]:
    """Wraps core_config_from_args(args, dataclass), to which a field that the YAML does not name is an error."""
    arguments, config_class = call.args
    for field in dataclasses.fields(config_class):
        if field.metadata.get("added_in_place") and not hasattr(arguments, field.name):
            setattr(arguments, field.name, field.default)
    return call.proceed()
