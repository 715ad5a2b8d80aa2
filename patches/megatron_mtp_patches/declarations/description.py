"""Describes the settings of a patch. `explain` and the pages are made of this."""

from __future__ import annotations

from typing import NamedTuple

from ..engine import AddField, AddFlag, Patch
from .settings import TRANSFORMER_CONFIG


class SettingText(NamedTuple):
    """The description of a flag, or of a config field that has none.

    Attributes:
        name: `--flag X`, or the field.
        field: `Config.field`, which other trainers set; "" where the flag is for Megatron-LM's trainer alone.
        default: of the field, or of a flag without one: off for False, none for None.
        effect: of the flag, in a sentence.
        is_upstream: newer releases have it.
        named_in: the number of an upstream change that has a field of this name and is in no known release; 0 for none.
    """

    name: str
    field: str
    default: str
    effect: str
    is_upstream: bool
    named_in: int


def setting_texts(patch: Patch) -> list[SettingText]:
    """The descriptions of the settings that the patch adds to Megatron or to another package.

    Megatron makes flags of the fields of its TransformerConfig itself.
    """
    fields = [edit for edit in patch.edits if isinstance(edit, AddField)]
    if patch.package:
        return [
            SettingText(
                f"{edit.name}.{edit.field} of {patch.package}",
                "",
                _default(edit),
                edit.doc,
                edit.is_upstream,
                edit.named_in,
            )
            for edit in fields
            if edit.setting
        ]
    flags = [edit for edit in patch.edits if isinstance(edit, AddFlag)]
    field_names = {edit.field: f"{edit.name}.{edit.field}" for edit in fields}
    named_in = {edit.field: edit.named_in for edit in fields}
    texts = [
        SettingText(
            _flag(edit.flag, edit.type, edit.metavar),
            field_names.get(argument_of(edit), ""),
            _default(edit),
            edit.help,
            False,
            named_in.get(argument_of(edit), 0),
        )
        for edit in flags
    ]
    for edit in fields:
        flag = flag_of(edit)
        if flag not in {edit.flag for edit in flags}:
            has_flag = edit.target == TRANSFORMER_CONFIG
            name = _flag(flag, edit.type) if has_flag else f"{edit.name}.{edit.field}"
            texts.append(
                SettingText(name, field_names[edit.field], _default(edit), edit.doc, edit.is_upstream, edit.named_in)
            )
    return texts


def argument_of(edit: AddField | AddFlag) -> str:
    """The attribute of Megatron's arguments that has the value."""
    return edit.field if isinstance(edit, AddField) else edit.flag.removeprefix("--").replace("-", "_")


def flag_of(edit: AddField | AddFlag) -> str:
    """The flag; Megatron's flag of a field that is True turns it off."""
    if isinstance(edit, AddFlag):
        return edit.flag
    return f"--{'no-' * (edit.default is True)}{edit.field.replace('_', '-')}"


def _flag(flag: str, type: object, metavar: str | None = None) -> str:
    return flag if type is bool else f"{flag} {metavar or ('N' if type is int else 'X')}"


def _default(edit: AddFlag | AddField) -> str:
    if edit.default is True:
        return "field: True; the flag sets False"
    return "off" if edit.default is False else "none" if edit.default is None else str(edit.default)
