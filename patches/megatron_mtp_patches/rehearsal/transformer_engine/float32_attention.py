"""Fused attention in float32: an option of the rehearsal, off unless `allow` is called.

TransformerEngine asks for half precision there, for the sake of cuDNN; the stand-ins compute in float32 anyway. In
float32 it would refuse context parallelism, and elsewhere take its unfused attention, which reads attention masks that
fused attention leaves out. A run in which this is allowed does not run on a GPU, so `parity` alone uses it and says so.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any

import torch

from ...engine import PatchError

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_HALF = "torch.float16, torch.bfloat16]"


def allow() -> None:
    """Let fused attention take float32 in this process.

    Raises:
        PatchError: this TransformerEngine asks for half precision in another way.
    """
    backends = sys.modules[f"{_ATTENTION}.backends"]
    _accept_float32(backends)
    _choose_as_in_bfloat16(sys.modules[f"{_ATTENTION}.utils"])


def _accept_float32(backends: ModuleType) -> None:
    """Compile FusedAttention.forward again with float32 among the types that it accepts."""
    source = textwrap.dedent(inspect.getsource(backends.FusedAttention.forward))
    accepting = source.replace(_HALF, f"{_HALF[:-1]}, torch.float32]")
    if accepting == source:
        raise PatchError("this TransformerEngine has no check of half precision in FusedAttention.forward")
    names: dict[str, Any] = {}
    exec(compile(accepting, str(backends.__file__), "exec"), vars(backends), names)
    backends.FusedAttention.forward = names["forward"]


def _choose_as_in_bfloat16(utils: Any) -> None:
    """Choose the backend in float32 as in bfloat16."""
    choose = utils.get_attention_backend

    def choose_backend(params: Any) -> Any:
        if params.qkv_dtype == torch.float32:
            params = dataclasses.replace(params, qkv_dtype=torch.bfloat16)
        return choose(params)

    utils.get_attention_backend = choose_backend
