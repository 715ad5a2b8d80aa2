"""The arguments of the run, where Megatron's own trainer has parsed them."""

from __future__ import annotations

import sys
from typing import Any


def arguments_of_run() -> Any:
    """The arguments of Megatron's trainer; None if another one runs."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)
