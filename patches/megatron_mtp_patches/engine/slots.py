"""One attribute of Megatron's: the original in it, the edits stacked on it, and the value they make together."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from argparse import ArgumentError, ArgumentParser
from types import CodeType, MethodType, ModuleType
from typing import Any, cast, get_origin

import wrapt

from .copies import Copies
from .declare import AddFlag, Edit, Export, PatchError, Replace, Wrap
from .facts import ask
from .questions import ask_lines, is_checked

MISSING = object()
_DECORATING = ("builtins", "functools", "torch")  # whose objects decorate Megatron's own functions


class Slot:
    """The place `owner.name`. Edits may come and go in any order: the value is always made anew from the original."""

    def __init__(self, module: ModuleType, name: str, copies: Copies) -> None:
        *self._parents, self.name = name.split(".")
        self.module = module
        self.qualified_name = name
        self._copies = copies
        copies.follow(module)  # the name may be a copy of what has been replaced elsewhere
        self.owner: Any = functools.reduce(getattr, self._parents, module)
        self.original = self.value = vars(self.owner).get(self.name, MISSING)
        self.edits: list[Edit] = []
        self._homes: set[str] = set()  # the modules that the overrides come from

    def add(self, edit: Edit) -> None:
        self._check(edit)
        before = self.value
        self.edits.append(edit)
        if isinstance(edit, (Replace, Export)):
            self._homes.add(edit.home)
        try:
            self._rebuild()
        except BaseException:
            self.edits.remove(edit)
            self._put(before)
            raise

    def remove(self, edit: Edit) -> None:
        before = list(self.edits)
        self.edits.remove(edit)
        try:
            self._rebuild()
        except BaseException:
            self.edits = before
            raise

    def _check(self, edit: Edit) -> None:
        others = [other for other in self.edits if isinstance(other, Replace)]
        if isinstance(edit, Replace) and others:
            overrides = f"{others[0].override} and by {edit.override}"
            raise PatchError(f"{edit.target} is replaced by {overrides}; one override must serve both")
        if isinstance(edit, Export) or (isinstance(edit, Wrap) and edit.any_source):
            return  # an Export leaves alone what it finds
        stranger = find_stranger(self.original, self.module, deep=isinstance(edit, Replace))
        if stranger:
            raise PatchError(
                f"{edit.target} was already changed by {stranger}. Import megatron_mtp_patches before it, or leave "
                f"out one of the two"
            )
        code = getattr(inspect.unwrap(self.original), "__code__", None)
        if is_checked(edit) and code is not None and not _is_on_disk(code, self.module.__name__):
            raise PatchError(
                f"{edit.target} does not run what is in {self.module.__file__} now, which these patches have checked: "
                f"that file was changed after it was imported or compiled. Start the process again; if that does not "
                f"help, delete the __pycache__ beside it"
            )

    def _rebuild(self) -> None:
        value = self.original
        for edit in sorted(self.edits, key=lambda edit: not isinstance(edit, (Replace, Export))):
            value = _build(edit, value)
        self._put(value)

    def is_gone(self, module: ModuleType) -> bool:
        """Whether this place is not that of `module`, which was executed anew."""
        owner: Any = module
        for name in self._parents:
            owner = getattr(owner, name, None)
        return owner is not self.owner or vars(owner).get(self.name, MISSING) is not self.value

    @property
    def is_changed_since(self) -> bool:
        """Whether somebody has put something else here since the last edit."""
        return self.value is not self.original and vars(self.owner).get(self.name, MISSING) is not self.value

    def _put(self, value: Any) -> None:
        if value is self.value:
            return
        if vars(self.owner).get(self.name, MISSING) is not self.value:
            raise PatchError(
                f"{self.module.__name__}:{self.qualified_name} was changed by somebody else after these patches were "
                f"applied; undo that first"
            )
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
        old, self.value = self.value, value
        if isinstance(self.owner, ModuleType) and old is not MISSING and value is not MISSING:
            self._copies.move(old, value, f"{self.module.__name__}:{self.qualified_name}", self._homes)


def _is_on_disk(code: CodeType, module: str) -> bool:
    """Whether a function of that name begins in the same line of the source: the code may come from an older file."""
    lines = ask(module, ask_lines(code.co_name))
    return not lines or code.co_firstlineno in cast("list[int]", lines)


def find_stranger(value: Any, module: ModuleType, deep: bool) -> str | None:
    """Who, other than Megatron itself and torch's decorators, has put this function here; None if nobody.

    `deep` looks at each layer of a decorated function, otherwise only the innermost has to be Megatron's.
    """
    layers = [value]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    for layer in layers if deep else layers[-1:]:
        function = getattr(layer, "_self_wrapper", layer)  # wrapt shows the code of what it wraps as its own
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        if file is not None:
            if not _belongs(file, module):
                return f"{function.__globals__.get('__name__')} ({file})"
        elif layer is MISSING or isinstance(layer, (property, type)):
            continue
        elif layer is layers[-1] or type(layer).__module__.partition(".")[0] not in _DECORATING:
            return f"{type(layer).__module__}.{type(layer).__qualname__}, which is no function of {module.__name__}"
    return None


def _belongs(file: str, module: ModuleType) -> bool:
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    torch_root = torch_file.rpartition("__init__")[0] if torch_file else None
    return file == module.__file__ or bool(torch_root and file.startswith(torch_root))


class BoundWrapped(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # wrapt 1 takes none
    """A method that was looked up. `Class.method(something)` is a method of `something` even if that is no Class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code = getattr(self.__wrapped__, "__code__", None)
        if self._self_instance is None and args and code is not None and code.co_varnames[:1] == ("self",):
            wrapper: Any = self._self_wrapper
            return wrapper(MethodType(self.__wrapped__, args[0]), args[0], args[1:], kwargs)
        return super().__call__(*args, **kwargs)


class Wrapped(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapt wrapper that pickles by name and is not copied, as the function it stands for."""

    __bound_function_wrapper__ = BoundWrapped

    def __reduce__(self) -> str:
        return self.__qualname__

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__

    def __copy__(self) -> Wrapped:
        return self

    def __deepcopy__(self, memo: Any) -> Wrapped:
        return self


def _build(edit: Edit, value: Any) -> Any:
    if isinstance(edit, Replace):
        return load(edit.override)
    if isinstance(edit, Export):
        return load(edit.override) if value is MISSING else value
    if value is MISSING:
        raise PatchError(f"{edit.target} does not exist")
    if isinstance(edit, Wrap):
        return Wrapped(value, load(edit.wrapper))
    if isinstance(edit, AddFlag):
        return Wrapped(value, functools.partial(_add_flag, edit))
    raise PatchError(f"{type(edit).__name__} does not fit {edit.target}")


def _add_flag(edit: AddFlag, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> ArgumentParser:
    parser = wrapped(*args, **kwargs)
    try:
        if edit.type is bool:
            parser.add_argument(edit.flag, action="store_true", help=edit.help)
        elif get_origin(edit.type) is list:
            parser.add_argument(edit.flag, action="append", default=edit.default, help=edit.help)
        else:
            parser.add_argument(edit.flag, type=edit.type, default=edit.default, help=edit.help)
    except ArgumentError:
        pass  # this Megatron, or the user's own script, has the flag
    return parser


def is_bound(module: ModuleType, name: str) -> bool:
    """Whether the imported `module` has the qualified `name`."""
    try:
        functools.reduce(inspect.getattr_static, filter(None, name.split(".")), module)
    except AttributeError:
        return False
    return True


def load(path: str) -> Any:
    """The object that `package.module:Qualified.name` names."""
    module, _, name = path.partition(":")
    return functools.reduce(inspect.getattr_static, name.split("."), importlib.import_module(module))
