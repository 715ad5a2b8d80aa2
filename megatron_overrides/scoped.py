"""Give a context variable a value for the extent of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Within, `variable` has this value; afterwards it has the value that it had before."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
