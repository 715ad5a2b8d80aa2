"""One call of a wrapped function, as its wrapper gets it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class Call:
    """A call that a wrapper answers: it reads and changes arguments by name, and lets the function run.

    Attributes:
        function: what is wrapped; a method is bound.
        instance: the object of a method, the class of a classmethod, None of a plain function.
        args: the positional arguments as the caller gave them, without the instance.
        kwargs: the keyword arguments as the caller gave them. Both may be changed until an argument is asked by name.
    """

    __slots__ = ("function", "instance", "args", "kwargs", "_signature", "_bound")

    def __init__(
        self, function: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self._signature: inspect.Signature | None = None
        self._bound: inspect.BoundArguments | None = None

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function, without the instance."""
        if self._signature is None:
            self._signature = inspect.signature(self.function)
        return self._signature.parameters

    def __getitem__(self, name: str) -> Any:
        """Return the argument `name`, or its default.

        Raises:
            KeyError: the function has no such parameter.
            TypeError: the caller's arguments do not fit the function.
        """
        arguments = self._bind().arguments
        if name not in arguments and self.parameters[name].default is not inspect.Parameter.empty:
            return self.parameters[name].default
        return arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument `name` or its default; `default` if the function has no such parameter."""
        return self[name] if name in self.parameters else default

    def __setitem__(self, name: str, value: Any) -> None:
        """Change the argument `name` of the call that proceed() makes."""
        if name not in self.parameters:
            raise KeyError(name)
        self._bind().arguments[name] = value

    def proceed(self, instance: Any = None) -> Any:
        """Run the function with the arguments as they are now; return what it returns.

        Args:
            instance: run the method of this object instead, with the other wrappers around it.
        """
        function: Any = self.function
        if instance is not None:
            # `__func__` of a wrapped method is the function inside all wrappers
            method = getattr(function, "_self_parent", None) or function.__func__
            function = method.__get__(instance, type(instance))
        if self._bound is None:
            return function(*self.args, **self.kwargs)
        return function(*self._bound.args, **self._bound.kwargs)

    def _bind(self) -> inspect.BoundArguments:
        if self._bound is None:
            self._signature = self._signature or inspect.signature(self.function)
            self._bound = self._signature.bind(*self.args, **self.kwargs)
        return self._bound
