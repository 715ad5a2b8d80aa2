"""Layer 6: nothing is compiled.

`install()` of the package sets TORCHDYNAMO_DISABLE before torch is imported. torch.compile itself becomes the identity,
so that Megatron's jit_fuser returns plain functions. torch.jit.script becomes the identity as well: it would try to
compile the wrappers that other layers have put around torch's functions, and fail.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Make torch.compile and torch.jit.script the identity, both as calls and as decorators."""
    torch.compile = _identity
    torch.jit.script = _identity


def _identity(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function
