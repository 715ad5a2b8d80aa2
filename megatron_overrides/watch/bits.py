"""A sum over the bits of a tensor: equal for copies, and another one after a flipped bit or a swapped pair."""

from __future__ import annotations

import torch

PIECE = 1 << 21  # elements at a time, so that a temporary of 8 bytes for each takes 16 MB; there are two
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size, flattened."""
    return tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])


@torch.no_grad()
def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer, times 1, 3, 5 ... by its place, added up modulo 2^64.

    An odd factor makes each flipped bit change the sum, whatever the place. Two elements that are swapped change it by
    twice their distance times their difference.

    Returns:
        Int64 [1], on the device of the tensor.
    """
    values = view_bits(tensor)
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for start in range(0, values.numel(), PIECE):
        piece = values[start : start + PIECE].to(torch.int64)
        factors = torch.arange(2 * start + 1, 2 * (start + piece.numel()), 2, device=tensor.device)
        total += factors.mul_(piece).sum()
    return total
