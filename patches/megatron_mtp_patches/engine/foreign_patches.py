"""Find functions of the patched library that another library has replaced."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_DECORATING = ("builtins", "functools", "torch")  # whose objects decorate a library's own functions


def find_foreign_patch(value: Any, module: ModuleType, deep: bool) -> str | None:
    """Name the code that has replaced a function of `module`; None if it is the module's, perhaps decorated by torch.

    `deep` examines each layer of a decorated function; otherwise only the innermost one has to be the module's.
    """
    layers = [value]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    for layer in layers if deep else layers[-1:]:
        function = getattr(layer, "_self_wrapper", layer)  # wrapt shows the code of what it wraps as its own
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        if file is not None:
            if not _is_defined_by(file, module):
                return f"{function.__globals__.get('__name__')} ({file})"
        elif isinstance(layer, (property, type)):
            continue
        elif layer is layers[-1] or type(layer).__module__.partition(".")[0] not in _DECORATING:
            return f"{type(layer).__module__}.{type(layer).__qualname__}, which is not a function of {module.__name__}"
    return None


def _is_defined_by(file: str, module: ModuleType) -> bool:
    """True if code of `file` is that of `module`, or of one of torch's decorators."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    torch_root = torch_file.rpartition("__init__")[0] if torch_file else None
    return file == module.__file__ or bool(torch_root and file.startswith(torch_root))
