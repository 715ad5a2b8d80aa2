"""What a wrapper gets of the call that it answers. The engine of the patches makes it (engine/call.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Protocol


class Call(Protocol):
    """A call of a wrapped function.

    Attributes:
        function: what is wrapped; a method is bound.
        instance: the object of a method, the class of a classmethod, None of a plain function.
        args: the positional arguments as the caller gave them, without the instance.
        kwargs: the keyword arguments as the caller gave them.
    """

    function: Callable[..., Any]
    instance: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters of the function, without the instance."""

    def __getitem__(self, name: str) -> Any:
        """Return the argument `name`, or its default; a KeyError if there is no such parameter."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument `name` or its default; `default` if there is no such parameter."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Change the argument `name` of the call that proceed() makes."""

    def proceed(self, instance: Any = None) -> Any:
        """Run the function with the arguments as they are now, as a method of `instance` if one is given."""
