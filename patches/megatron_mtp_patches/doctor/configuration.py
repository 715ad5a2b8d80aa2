"""A run that the configuration of a framework describes, with what is wrong with its settings of the patches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..catalog import SETTINGS

# {setting: the class that has it}; Megatron-Bridge has classes of the same names, which inherit Megatron's fields.
_CLASSES = {setting.name: edit.target.rpartition(":")[2] for edit, setting in SETTINGS.items()}
_DECLARED = {setting.name: setting for setting in SETTINGS.values()}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # what models of Hugging Face call their number
_DTYPES = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}


class Configuration(NamedTuple):
    """A run of a framework.

    Attributes:
        sources: its sections as objects.
        hints: what keeps the settings of the patches from acting.
        patches: which patches it chooses, as in MEGATRON_MTP_PATCHES; '' where it chooses none.
        notes: what is not known of the run.
    """

    sources: list[SimpleNamespace]
    hints: list[str]
    patches: str = ""
    notes: tuple[str, ...] = ()


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


def read_hugging_face_sizes(folder: object, has_heads: bool) -> tuple[list[SimpleNamespace], tuple[str, ...]]:
    """The experts and, if it `has_heads`, the MTP heads of a model of Hugging Face; and a note where it is not here.

    Megatron-Bridge, which makes Megatron's model of it, has experts in a grouped GEMM.
    """
    file = Path(str(folder), "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        note = f"experts and MTP heads count as absent unless the settings have them: there is no {file} to read"
        return [], (note,)
    config = {**config, **(config.get("text_config") or {})}
    experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
    heads = config.get("num_nextn_predict_layers") if has_heads else None
    sizes = {"num_moe_experts": experts, "moe_grouped_gemm": bool(experts) or None, "mtp_num_layers": heads}
    return [SimpleNamespace(**sizes)], ()


def misplaced_settings(section: dict[Any, Any], place: str, classes: tuple[str, ...]) -> list[str]:
    """Say how to correct settings of the patches that are misspelt or invalid, or that these classes lack.

    Args:
        section: what becomes an object of one of the classes.
        place: the name of the section in the file; '' for the whole file.
        classes: as "module:Class"; none for a section of which no setting of the patches is read.
    """
    from megatron_overrides.settings.checks import find_similar

    hints = []
    names = [one.rpartition(":")[2] for one in classes]
    for name in map(str, section):
        where = f"{place}.{name}" if place else name
        if name in _CLASSES and _CLASSES[name] not in names:
            hints.append(f"{where} is not read there: it is a setting of {_CLASSES[name]}")
        elif name in _CLASSES:
            hints += [f"{where}: {refusal}" for refusal in _refusals(name, section)]
        elif names and (similar := find_similar(name.replace("-", "_"), _CLASSES)):
            hints.append(f"{where}: did you mean {similar}?")
    return hints


def _refusals(name: str, section: dict[Any, Any]) -> list[str]:
    """The reason why the value of a setting is refused; none if it is not."""
    from megatron_overrides.settings.checks import check

    try:
        check(make_source(section), (_DECLARED[name],))
    except ValueError as error:
        return [str(error)]
    return []
