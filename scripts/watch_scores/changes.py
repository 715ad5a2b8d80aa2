"""The changes of tensors that are faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .places import Piece

_INTEGERS = {2: torch.int16, 4: torch.int32}


@torch.no_grad()
def change_tensor(
    piece: Piece, change: dict[str, Any], before: torch.Tensor | None, find_other: Callable[[str], Piece | None]
) -> bool:
    """Make the change of a fault where this part has its element.

    Args:
        before: the values that `restore` puts back.
        find_other: returns the same of another parameter, for `exchange`.

    Returns:
        False if it has not.
    """
    values, element = piece.values, change.get("element", 0)
    if "swap" in change:
        first, second = change["swap"]
        if not (piece.has(first) and piece.has(second)):
            return False
        pair = [first - piece.start, second - piece.start]
        values[pair] = values[pair[::-1]]
    elif "exchange" in change:
        other = find_other(change["exchange"])
        if other is None:
            return False
        mine = values.clone()
        values.copy_(other.values)
        other.values.copy_(mine)
    elif "restore" in change:
        assert before is not None
        values.copy_(before)
    elif "zero" in change:
        values.zero_()
    elif not piece.has(element):
        return False
    elif "flip" in change:
        values.view(_INTEGERS[values.element_size()])[element - piece.start] ^= 1 << change["flip"]
    elif "set" in change:
        values[element - piece.start] = change["set"]
    else:
        values[element - piece.start] += change["add"]
    return True
