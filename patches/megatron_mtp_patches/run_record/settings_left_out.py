"""Refuse settings of patches that are left out: an object takes any attribute, and nothing would read it.

A command line needs no such check, because its parser does not know the flag then.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.model_chunks import as_list

from ..catalog import CATALOG
from ..engine import AddField
from ..engine.call import Call
from ..engine.state import State
from ..megatron_engine import ENGINE


def refuse_settings_left_out(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, ...), where both configurations of a run are known.

    Raises:
        ValueError: one of them has such a setting.
    """
    model_config = next((chunk.config for chunk in as_list(call["model_chunks"]) if hasattr(chunk, "config")), None)
    for config in (call["config"], model_config):
        if message := describe_setting_left_out(config):
            raise ValueError(message)
    return call.proceed()


def describe_setting_left_out(config: Any) -> str:
    """Name an attribute of `config` that is no field because its patch is left out, and the way out; '' for none."""
    fields = getattr(type(config), "__dataclass_fields__", None)
    strays = vars(config).keys() - fields.keys() if fields else set()
    for patch in CATALOG if strays else ():
        names = {edit.field for edit in patch.edits if isinstance(edit, AddField)} & strays
        report = ENGINE.report(patch) if names else None
        if report and report.state in (State.DISABLED, State.REFUSED):
            return (
                f"config.{min(names)} is set on the {type(config).__name__}, but {patch.id}, which would read it, is "
                f"{report.state}: {report.reason}. Take that patch, or remove the setting"
            )
    return ""
