"""Refuse settings of patches that are left out: an object takes any attribute, and nothing would read it.

A command line needs no such check, because its parser does not know the flag then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import _engine
from .catalog import CATALOG
from .engine import AddField
from .engine.call import Call
from .engine.state import State


def check_configs(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), where both configurations of a run are known.

    Raises:
        ValueError: one of them has such a setting.
    """
    chunks = call["model_chunks"] if isinstance(call["model_chunks"], (list, tuple)) else [call["model_chunks"]]
    for config in (call["config"], *(getattr(chunk, "config", None) for chunk in chunks[:1])):
        for message in describe_settings_left_out(config):
            raise ValueError(message)
    return call.proceed()


def describe_settings_left_out(config: Any) -> Iterator[str]:
    """A sentence for each attribute that is no field of a configuration and that a patch would make one."""
    fields = getattr(type(config), "__dataclass_fields__", None)
    strays = vars(config).keys() - fields.keys() if fields else set()
    for patch in CATALOG if strays else ():
        names = {edit.field for edit in patch.edits if isinstance(edit, AddField)}
        report = _engine.report(patch) if names & strays else None
        if report and report.state in (State.DISABLED, State.REFUSED):
            yield (
                f"config.{min(names & strays)} is set on the {type(config).__name__}, but {patch.id}, which would read "
                f"it, is {report.state}: {report.reason}. Take that patch, or remove the setting"
            )
