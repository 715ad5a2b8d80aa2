"""What is in Megatron's objects: how often each edit is in force there, and what has changed since.

It is read from the objects themselves, not from what the engine says of itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import sys
import typing
from typing import Any

from megatron_mtp_patches import Patch, Report, status
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag, Override, Wrap
from megatron_mtp_patches.engine.declare import Edit
from megatron_mtp_patches.engine.patched_attribute import load
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.engine.state import State, TargetState

PATCHES = (*BASE, *CATALOG)
MODULES = list(dict.fromkeys(module for patch in PATCHES for module in patch.modules))
MISSING = "missing"
# Values of fields for which no value of VALUES_OF_TYPE is valid.
VALUES = {"mtp_grad_scale_func": float}
VALUES_OF_TYPE = {bool: (True, False), int: (1, 3), float: (0.5, 0.25), str: ("1", "3")}
# What a configuration cannot be made without.
NEEDED = {"num_layers", "hidden_size", "num_attention_heads"}


def import_targets() -> None:
    """Import every module of this Megatron that the patches touch."""
    for module in filter(find_file, MODULES):
        importlib.import_module(module)


def reports() -> dict[str, Report]:
    """What `status()` says, by patch."""
    return {report.id: report for report in status()}


# -- edits in force ------------------------------------------------------------------------------------------------


def problems(patch: Patch, report: Report, state: State) -> list[str]:
    """What speaks against `patch` being in `state` and, if that is applied or repaired, in force exactly once."""
    unmet = [] if report.state == state else [f"{patch.id} is {report.state}, not {state}"]
    counts = {edit: count(edit) for edit in patch.edits}
    # Of a native patch an edit may be in force for the sake of another patch.
    others = [other for other in CATALOG if other is not patch] if state is State.NATIVE else []
    shared = {edit for other in others for edit in other.edits}
    here = {edit: n for edit, n in counts.items() if n not in (None, "native") and edit not in shared}
    wanted = 1 if state in (State.APPLIED, State.REPAIRED) else 0
    unmet += [f"{describe(edit)} is in force {n} times" for edit, n in here.items() if n != wanted]
    # What is native may be in a class that Megatron has with TransformerEngine alone.
    if state is not State.NATIVE and bool(here) == (state is State.PENDING):
        unmet.append(f"{len(here)} edits have a target here")
    absent = {edit.target for edit, n in counts.items() if n is None}
    for target, told in report.targets.items():
        there = TargetState.ABSENT if target in absent else TargetState.APPLIED
        right = TargetState.UNTOUCHED if state is State.NATIVE else there
        unmet += [] if told == right else [f"{target} is reported as {told}, not {right}"]
    return unmet


def describe(edit: Edit) -> str:
    added = [getattr(edit, kind) for kind in ("field", "flag") if hasattr(edit, kind)]
    return " ".join([type(edit).__name__, edit.target, *added])


def in_force() -> dict[str, list[int | str | None]]:
    """How often each edit of each patch is in force."""
    return {patch.id: [count(edit) for edit in patch.edits] for patch in PATCHES}


def find_owner(edit: Edit) -> tuple[Any, str]:
    """The object that holds the target, and the target's name there; None where this Megatron has no such object."""
    module = sys.modules.get(edit.module)
    *parents, name = edit.name.split(".")
    try:
        return functools.reduce(getattr, parents, module), name
    except AttributeError:
        return None, name


def count(edit: Edit) -> int | str | None:
    """How often the edit is in force; None: no such target here; "native": Megatron has the name or field itself."""
    owner, name = find_owner(edit)
    if owner is None or (name not in vars(owner) and not edit.adds_name):
        return None
    value = vars(owner).get(name)
    layers = [value]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    if isinstance(edit, Override) and not edit.replaces:
        return "native" if value is not None and value is not load(edit.override) else int(value is not None)
    if isinstance(edit, Override):
        return sum(layer is load(edit.override) for layer in layers)  # wraps may lie around it
    if isinstance(edit, Wrap):
        wrapper = load(edit.wrapper)
        return sum(getattr(layer, "_self_override", None) is wrapper for layer in layers)
    if isinstance(edit, AddField):
        fields = [field for field in dataclasses.fields(value) if field.name == edit.field]
        if fields:
            needed = dict.fromkeys(NEEDED.intersection(inspect.signature(value).parameters), 1)
            value_to_set = choose_value(edit)
            assert value_to_set != edit.default or edit.setting.example == edit.default
            assert getattr(value(**needed, **{edit.field: value_to_set}), edit.field) == value_to_set
            assert getattr(value(**needed), edit.field) == edit.default
            assert inspect.signature(value).parameters[edit.field].default == edit.default
        return "native" if any("added_in_place" not in field.metadata for field in fields) else len(fields)
    assert isinstance(edit, AddFlag)
    parser = make_parser(Identity(value))
    action = parser._option_string_actions.get(edit.flag)
    if action:
        kind = list[str] if isinstance(action, argparse._AppendAction) else action.type or bool
        assert (action.default, kind) == (edit.default, edit.type)
    return sum(edit.flag in action.option_strings for action in parser._actions)


@dataclasses.dataclass(frozen=True)
class Identity:
    """The key of an object in a cache: it equals itself alone, where a wrapper equals the function that it wraps."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@functools.cache
def make_parser(add_arguments: Identity) -> argparse.ArgumentParser:
    """The parser with the flags of one of Megatron's functions. It is made once, because making it is slow."""
    return add_arguments.value(argparse.ArgumentParser(conflict_handler="error", allow_abbrev=False))


def choose_value(edit: AddField) -> object:
    """A valid value of the field, chosen by its type; the default only where no other is valid alone."""
    if edit.field in VALUES:
        return VALUES[edit.field]
    if getattr(edit.setting, "example", None) is not None:
        return edit.setting.example
    types = [edit.type, *typing.get_args(edit.type)]  # float of `float | None`, too
    values = [value for kind in types for value in VALUES_OF_TYPE.get(kind, ()) if value != edit.default]
    assert values, f"give {edit.field} ({edit.type}) a value in VALUES of {__file__}"
    return values[0]


# -- changes since ---------------------------------------------------------------------------------------------------


def snapshot() -> list[tuple]:
    """What every owner of a target, and every class that inherits from one, holds."""
    owners = {}
    for edit in (edit for patch in PATCHES for edit in patch.edits):
        owner, name = find_owner(edit)
        if owner is None:
            continue
        owners[id(owner)] = owner
        value = vars(owner).get(name)
        for cls in family(owner) + family(value):
            owners[id(cls)] = cls
    fields = [dict(owner.__dataclass_fields__) for owner in owners.values() if hasattr(owner, "__dataclass_fields__")]
    return [(owner, dict(vars(owner))) for owner in owners.values()] + [(None, names) for names in fields]


def family(cls: object) -> list[type]:
    if not isinstance(cls, type):
        return []
    return [cls, *(member for child in cls.__subclasses__() for member in family(child))]


def changes_since(before: list[tuple]) -> list[str]:
    """The names that are no longer bound to the same object as when `before` was made, by `snapshot`."""
    after = snapshot()
    assert [owner for owner, _ in before] == [owner for owner, _ in after]
    return [
        f"{getattr(owner, '__name__', 'fields')}.{name}"
        for (owner, old), (_, new) in zip(before, after, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name, MISSING) is not new.get(name, MISSING)
        and name not in ("__abstractmethods__", "__warningregistry__")
    ]
