"""A sum over the bits of a tensor: equal for copies, and another one after a flipped bit or a swapped pair."""

from __future__ import annotations

from functools import cache

import torch

PIECE = 1 << 21  # elements at a time, so that a temporary of 8 bytes for each takes 16 MB; there are two
ROW = 1 << 16  # elements that have factors of their own
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size, flattened."""
    return tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])


@torch.no_grad()
def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer, times an odd number by its place, added up modulo 2^64.

    An odd factor makes each flipped bit change the sum, whatever the place. Factors are random, so that a change of all
    elements by the same amount changes it as well: of floating-point numbers that are doubled, 1 is added to each
    exponent. A row has the same factors as another one, times 1, 3, 5 ... by its number.

    Returns:
        Int64 [1], on the device of the tensor.
    """
    values, factors = view_bits(tensor), _make_factors(tensor.device)
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for start in range(0, values.numel(), PIECE):
        piece = values[start : start + PIECE].to(torch.int64)
        first, rows = start // ROW, piece.numel() // ROW
        whole, rest = piece[: rows * ROW].view(rows, ROW), piece[rows * ROW :]
        if rows:
            numbers = torch.arange(2 * first + 1, 2 * (first + rows) + 1, 2, device=tensor.device)
            total += ((whole * factors).sum(1) * numbers).sum()
        total += (rest * factors[: rest.numel()]).sum() * (2 * (first + rows) + 1)
    return total


@cache
def _make_factors(device: torch.device) -> torch.Tensor:
    """Odd numbers, the same on all ranks: int64 [ROW]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(1 << 62), 1 << 62, (ROW,), generator=generator, device="cpu").mul_(2).add_(1).to(device)
