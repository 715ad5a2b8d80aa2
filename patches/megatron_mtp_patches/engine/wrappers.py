"""The replacement of a function that an edit wraps: a wrapper, or a parser with one more flag."""

from __future__ import annotations

import copy
import functools
import importlib
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, get_origin

import wrapt

from .call import Call
from .declare import AddFlag


class BoundWrapped(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # wrapt 1 takes none
    """A method that was looked up. `Class.method(something)` is a method of `something` even if that is no Class.

    It is copied and pickled as a bound method is: some models keep one on themselves.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code = getattr(self.__wrapped__, "__code__", None)
        if self._self_instance is None and args and code is not None and code.co_varnames[:1] == ("self",):
            answer: Any = self._self_wrapper
            return answer(MethodType(self.__wrapped__, args[0]), args[0], args[1:], kwargs)
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._self_instance is None:
            return _look_up, (self.__module__, self.__qualname__)
        return getattr, (self._self_instance, self.__name__)

    def __copy__(self) -> BoundWrapped:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        if self._self_instance is None:
            return self
        return getattr(copy.deepcopy(self._self_instance, memo), self.__name__)


def _look_up(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class Wrapped(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A function whose calls a wrapper answers. It pickles by name and is not copied, as the function it stands for.

    A method that is looked up in its class, or in a subclass that inherits it, is always the same object: by that
    nvidia-modelopt tells whether a subclass has its own `forward`.
    """

    __bound_function_wrapper__ = BoundWrapped
    _self_in_class: Any = None

    def __init__(self, function: Any, wrapper: Callable[[Call], Any]) -> None:
        super().__init__(function, lambda *call: wrapper(Call(*call)))
        self._self_override = wrapper

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None or not isinstance(_innermost(self), FunctionType):
            return super().__get__(instance, owner)
        if self._self_in_class is None:
            self._self_in_class = super().__get__(None, owner)
        return self._self_in_class

    def __reduce__(self) -> str:
        return self.__qualname__

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__

    def __copy__(self) -> Wrapped:
        return self

    def __deepcopy__(self, memo: Any) -> Wrapped:
        return self


def _innermost(function: Any) -> Any:
    while isinstance(function, Wrapped):
        function = function.__wrapped__
    return function


def with_flag(function: Any, edit: AddFlag) -> Wrapped:
    """`function`, whose parser also takes the flag."""
    return Wrapped(function, functools.partial(_add_flag, edit))


def _add_flag(edit: AddFlag, call: Call) -> ArgumentParser:
    parser: ArgumentParser = call.proceed()
    flag_type: Any = edit.type
    value: dict[str, Any] = {"default": edit.default, "metavar": edit.metavar, "help": edit.help}
    try:
        if flag_type is bool:
            parser.add_argument(edit.flag, action="store_true", help=edit.help)
        elif get_origin(flag_type) is list:
            parser.add_argument(edit.flag, action="append", **value)
        else:
            parser.add_argument(edit.flag, type=flag_type, **value)
    except ArgumentError:
        pass  # this release, or the user's own script, has the flag
    return parser
