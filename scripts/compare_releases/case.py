"""A case of seeded work, and the description of parameters in its record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """Seeded work.

    Attributes:
        run: does the work on every rank and returns what this rank has seen.
        sizes: of the model-parallel groups.
        ranks: the numbers of ranks on which the case runs.
        native: False if 0.19.2 deliberately does otherwise without the patches: the reference has them then.
        differs: {release: (why it is meant to differ, which words name the numbers that do)}.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    sizes: dict[str, int] = {}
    ranks: Iterable[int] = (1,)
    native: bool = True
    differs: dict[str, tuple[str, list[str]]] = {}


def describe(params: Iterable[Any]) -> dict[str, Any]:
    """Return the values of `params`, and a hash of them."""
    values = [torch.empty(0), *(param.detach().float().flatten().cpu() for param in params)]
    digest = hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()
    return {"values": [value.tolist() for value in values[1:]], "sha256": digest}
