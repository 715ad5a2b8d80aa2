"""Add keyword fields to an existing dataclass, in place, and take them out again.

In place because modules hold the class by name, and an argument generator may read its source. Subclasses
made later by @dataclass inherit the field from the base by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from .declare import AddField, PatchError


class AddedFields:
    """The fields that were added to dataclasses and to the subclasses that these had."""

    def __init__(self) -> None:
        self._added: dict[Any, dict[str, AddField]] = {}
        self._fields: dict[tuple[Any, str], dataclasses.Field[Any]] = {}
        # Native fields that carry the setting of an edit, and the metadata that they had.
        self._marked: dict[AddField, tuple[dataclasses.Field[Any], MappingProxyType[Any, Any]]] = {}
        self._inits: dict[Any, tuple[Any, Any]] = {}  # class -> its own __init__, and the one in its place
        self._signatures: dict[Any, inspect.Signature] = {}  # of those own ones: hundreds of parameters each

    def has(self, cls: Any) -> bool:
        """True if a field of `cls` was asked for."""
        return cls in self._added

    def add(self, cls: Any, edit: AddField) -> None:
        added = self._added.setdefault(cls, {})
        if native := cls.__dataclass_fields__.get(edit.field):
            self._mark(native, edit)
            return
        field = self._fields[cls, edit.field] = _make_field(edit)
        added[edit.field] = edit
        setattr(cls, edit.field, edit.default)
        cls.__annotations__[edit.field] = edit.type  # parsers made of a dataclass ask typing.get_type_hints
        for member in _dataclasses_from(cls):
            member.__dataclass_fields__.setdefault(edit.field, field)
        try:
            self._rebuild()
        except BaseException:
            del added[edit.field]
            self._forget(cls, edit)
            self._rebuild()
            raise

    def _mark(self, native: dataclasses.Field[Any], edit: AddField) -> None:
        if edit.setting is not None and "setting" not in native.metadata:
            self._marked[edit] = native, native.metadata
            native.metadata = MappingProxyType({**native.metadata, "setting": edit.setting})

    def remove(self, edit: AddField) -> None:
        if edit in self._marked:
            native, metadata = self._marked.pop(edit)
            native.metadata = metadata
        for cls, added in self._added.items():
            if added.get(edit.field) == edit:
                self._check()
                del added[edit.field]
                self._rebuild()
                self._forget(cls, edit)

    def changed_since(self, edit: AddField) -> list[str]:
        """The constructors that take this field and that another library has changed since."""
        owners = [cls for cls, added in self._added.items() if added.get(edit.field) == edit]
        return [_init_name(cls) for cls in self._changed() if any(issubclass(cls, owner) for owner in owners)]

    def _forget(self, cls: Any, edit: AddField) -> None:
        field = self._fields.pop((cls, edit.field))
        for member in _dataclasses_from(cls):
            if member.__dataclass_fields__.get(edit.field) is field:  # not a subclass's own field of that name
                del member.__dataclass_fields__[edit.field]
        delattr(cls, edit.field)
        del cls.__annotations__[edit.field]
        if not cls.__annotations__:  # Python made it when it was asked for
            del cls.__annotations__

    def _changed(self) -> list[Any]:
        return [cls for cls, (_, ours) in self._inits.items() if vars(cls).get("__init__") is not ours]

    def _check(self) -> None:
        changed = self._changed()
        if changed:
            raise PatchError(
                f"{', '.join(map(_init_name, changed))} was changed by another library after these patches were "
                f"applied; undo that first"
            )

    def _rebuild(self) -> None:
        """Build the constructors again from the originals: all of them or, if one cannot be built, none."""
        self._check()
        wanted: dict[Any, dict[str, AddField]] = {}
        for owner, added in self._added.items():
            for cls in _dataclasses_from(owner) if added else ():
                wanted.setdefault(cls, {}).update(added)
        built: dict[Any, tuple[Any, Any]] = {}
        for cls, edits in wanted.items():
            original = self._inits[cls][0] if cls in self._inits else vars(cls).get("__init__")
            # A subclass made after the field was added has it in its generated __init__ already.
            if original is not None:
                signature = self._signature(original)
                missing = {name: edit for name, edit in edits.items() if name not in signature.parameters}
                if missing:
                    built[cls] = (original, _init_with(missing, original, signature))
        for cls, (original, _) in self._inits.items():
            cls.__init__ = original
        for cls, (_, ours) in built.items():
            cls.__init__ = ours
        self._inits = built

    def _signature(self, original: Any) -> inspect.Signature:
        if original not in self._signatures:
            self._signatures[original] = inspect.signature(original)
        return self._signatures[original]


def _init_name(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}.__init__"


def _dataclasses_from(cls: Any) -> Iterator[Any]:
    """`cls` and, once each, the dataclasses that inherit from it."""
    members: dict[Any, None] = {}
    queue = [cls]
    while queue:
        current = queue.pop(0)
        if current not in members and "__dataclass_fields__" in vars(current):
            members[current] = None
        queue += current.__subclasses__()
    return iter(members)


def _make_field(edit: AddField) -> dataclasses.Field[Any]:
    # A field is complete only once a dataclass has been made of it.
    field = dataclasses.field(default=edit.default, metadata=edit.metadata, kw_only=True)
    one_field_class = dataclasses.make_dataclass("_", [(edit.field, edit.type, field)])
    return dataclasses.fields(one_field_class)[0]


def _init_with(added: dict[str, AddField], original: Any, signature: inspect.Signature) -> Any:
    """An `original` __init__ that takes the added fields as keywords too and sets them before __post_init__ runs."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, edit in added.items():
            # A subclass's own __init__ may have set it before it called this one.
            if name in kwargs or name not in vars(self):
                setattr(self, name, kwargs.pop(name, edit.default))
        original(self, *args, **kwargs)

    parameters = list(signature.parameters.values())
    position = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[position:position] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=edit.default, annotation=edit.type)
        for name, edit in added.items()
    ]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return __init__
