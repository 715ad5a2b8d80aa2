"""Add keyword fields to an existing dataclass, in place, and take them out again.

In place because Megatron's modules hold their config classes by name, and its argument generator reads the
source of the class. Subclasses made later by @dataclass inherit the field from the base by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from .declare import AddField, PatchError


class FieldSlot:
    """The fields that were added to one dataclass and to the subclasses it had."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.added: dict[str, AddField] = {}
        self._fields: dict[str, dataclasses.Field] = {}
        self._inits: dict[Any, tuple[Any, Any]] = {}  # class -> its own __init__, and the one in its place

    def add(self, edit: AddField) -> None:
        if edit.field in self.cls.__dataclass_fields__:  # native here
            return
        field = self._fields[edit.field] = _make_field(edit)
        self.added[edit.field] = edit
        setattr(self.cls, edit.field, edit.default)
        for cls in _family(self.cls):
            cls.__dataclass_fields__.setdefault(edit.field, field)
        try:
            self._rebuild()
        except BaseException:
            del self.added[edit.field]
            self._forget(edit)
            self._rebuild()
            raise

    def remove(self, edit: AddField) -> None:
        if edit.field not in self.added:
            return
        self._check()
        del self.added[edit.field]
        self._rebuild()
        self._forget(edit)

    def _forget(self, edit: AddField) -> None:
        field = self._fields.pop(edit.field)
        for cls in _family(self.cls):
            if cls.__dataclass_fields__.get(edit.field) is field:  # not a subclass's own field of that name
                del cls.__dataclass_fields__[edit.field]
        delattr(self.cls, edit.field)

    def changed_since(self) -> list[str]:
        """The constructors that somebody has changed since the last edit."""
        return [
            f"{cls.__module__}:{cls.__qualname__}.__init__"
            for cls, (_, ours) in self._inits.items()
            if vars(cls).get("__init__") is not ours
        ]

    def _check(self) -> None:
        changed = self.changed_since()
        if changed:
            raise PatchError(
                f"{', '.join(changed)} was changed by somebody else after these patches were applied; undo that first"
            )

    def _rebuild(self) -> None:
        """Make the constructors anew from the originals: all of them or, if one cannot be made, none."""
        self._check()
        made: dict[Any, tuple[Any, Any]] = {}
        for cls in _family(self.cls) if self.added else ():
            original = self._inits[cls][0] if cls in self._inits else vars(cls).get("__init__")
            # A subclass made after the field was added has it in its generated __init__ already.
            known = inspect.signature(original).parameters if original else self.added
            missing = {name: edit for name, edit in self.added.items() if name not in known}
            if missing:
                made[cls] = (original, _accepting(original, missing))
        for cls, (original, _) in self._inits.items():
            cls.__init__ = original
        for cls, (_, ours) in made.items():
            cls.__init__ = ours
        self._inits = made


def _family(cls: Any) -> Iterator[Any]:
    """`cls` and, once each, the dataclasses below it."""
    seen: dict[Any, None] = {}
    queue = [cls]
    while queue:
        current = queue.pop(0)
        if current not in seen and "__dataclass_fields__" in vars(current):
            seen[current] = None
        queue += current.__subclasses__()
    return iter(seen)


def _make_field(edit: AddField) -> dataclasses.Field:
    # A field is complete only once a dataclass has been made of it.
    metadata = {"argparse_meta": {"help": edit.doc}, "added_in_place": True}
    field = dataclasses.field(default=edit.default, metadata=metadata, kw_only=True)
    made = dataclasses.make_dataclass("_", [(edit.field, edit.type, field)])
    return dataclasses.fields(made)[0]


def _accepting(original: Any, added: dict[str, AddField]) -> Any:
    """`original.__init__` that takes the added fields as keywords too and sets them before __post_init__ runs."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, edit in added.items():
            # A subclass's own __init__ may have set it before it called this one.
            if name in kwargs or name not in vars(self):
                setattr(self, name, kwargs.pop(name, edit.default))
        original(self, *args, **kwargs)

    signature = inspect.signature(original)
    known = list(signature.parameters.values())
    position = len(known) - (bool(known) and known[-1].kind is inspect.Parameter.VAR_KEYWORD)
    known[position:position] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=edit.default, annotation=edit.type)
        for name, edit in added.items()
    ]
    __init__.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return __init__
