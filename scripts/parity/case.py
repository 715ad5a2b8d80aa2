"""What a case is, and how it describes what it has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """`run` does the work on every rank and returns what this rank has seen.

    Not `native`: 0.19.2 without the patches would deliberately do otherwise, so 0.19.2 with them is the reference.
    `differs` says of a release why it differs, where that is meant, and which words name the numbers that do.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    sizes: dict[str, int] = {}  # of the model-parallel groups
    ranks: Iterable[int] = (1,)
    native: bool = True
    differs: dict[str, tuple[str, list[str]]] = {}


def describe(params: Iterable[Any]) -> dict[str, Any]:
    """The values of `params`, and a hash of them."""
    values = [torch.empty(0), *(param.detach().float().flatten().cpu() for param in params)]
    digest = hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()
    return {"values": [value.tolist() for value in values[1:]], "sha256": digest}
