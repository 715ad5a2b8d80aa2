"""Layer 6: nothing is compiled.

`install()` of the package sets TORCHDYNAMO_DISABLE before torch is imported; torch.compile itself becomes the
identity, so that Megatron's jit_fuser leaves plain functions behind.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Make torch.compile the identity, called or used as a decorator."""
    torch.compile = _identity


def _identity(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function
