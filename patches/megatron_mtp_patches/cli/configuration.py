"""A run that the configuration of a framework describes, with what is wrong with its settings of the patches."""

from __future__ import annotations

from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..catalog import SETTINGS

_CLASSES = {setting.name: edit.target for edit, setting in SETTINGS.items()}  # of Megatron, that have the setting
_DTYPES = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


class Configuration(NamedTuple):
    """A run of a framework.

    Attributes:
        sources: its sections as objects.
        hints: what keeps the settings of the patches from acting.
    """

    sources: list[SimpleNamespace]
    hints: list[str]


def make_source(section: dict[Any, Any]) -> SimpleNamespace:
    """A section as an object.

    Left out are what YAML needs to make an object of it, settings that are objects of their own, and references to
    other settings (`${...}`).
    """
    return SimpleNamespace(
        **{
            str(name): value
            for name, value in section.items()
            if not str(name).startswith("_") and not isinstance(value, dict) and not str(value).startswith("${")
        }
    )


def make_dtype(name: object) -> SimpleNamespace:
    """Megatron's settings for a dtype of torch, such as bfloat16 or torch.bfloat16."""
    return SimpleNamespace(**_DTYPES.get(str(name).removeprefix("torch."), {}))


def misplaced_settings(section: dict[Any, Any], place: str, classes: tuple[str, ...]) -> list[str]:
    """What to change about settings of the patches that are misspelt, or that these classes of Megatron lack.

    Args:
        section: what becomes an object of one of the classes.
        place: the name of the section in the file; '' for the whole file.
        classes: as "module:Class".
    """
    hints = []
    for name in map(str, section):
        where = f"{place}.{name}" if place else name
        if name not in _CLASSES:
            close = get_close_matches(name, _CLASSES, n=1, cutoff=0.9)
            hints += [f"{where}: did you mean {close[0]}?"] if close else []
        elif _CLASSES[name] not in classes:
            hints.append(f"{where} is not read there: it is a setting of {_CLASSES[name].rpartition(':')[2]}")
    return hints
