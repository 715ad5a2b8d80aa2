"""The call that a wrapper answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Protocol


class Call(Protocol):
    """A call of a wrapped function, made by the engine of the patches: `Call` of engine/call.py says what each does."""

    function: Callable[..., Any]
    instance: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def parameters(self) -> Mapping[str, Parameter]: ...

    def __getitem__(self, name: str) -> Any: ...

    def get(self, name: str, default: Any = None) -> Any: ...

    def __setitem__(self, name: str, value: Any) -> None: ...

    def proceed(self, instance: Any = None) -> Any: ...
