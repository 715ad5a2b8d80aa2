"""How far copies that differ are from each other, and the finding that says so."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overrides.watch.bits import INTEGERS, PIECE, view_bits
from megatron_overrides.watch.copies import Comparison, Copies, Mismatch
from megatron_overrides.watch.findings import Finding, describe_ranks
from megatron_overrides.watch.relations import DIFFERENT, ROUNDING

MOST_ULPS = 2  # of a rounding
MOST_SAID = 1000
_LEAST = torch.iinfo(torch.int64).min


class Difference(NamedTuple):
    """The largest differences between copies of an element.

    Attributes:
        amount: of the values; inf where some copies of an element are inf or NaN and others are something else.
        ulps: the most steps from one number of the dtype to the next; None of integers, which are not rounded.
    """

    amount: float
    ulps: int | None

    @property
    def is_rounding(self) -> bool:
        return math.isfinite(self.amount) and self.ulps is not None and self.ulps <= MOST_ULPS

    def __str__(self) -> str:
        if not math.isfinite(self.amount):
            return "of an element some copies are inf or NaN"
        largest = f"largest difference {self.amount:.3g}"
        if self.ulps is None:
            return largest
        return f"{largest}, " + (f"at most {self.ulps} ulp" if self.ulps <= MOST_SAID else f"more than {MOST_SAID} ulp")


def describe_mismatches(copies: Copies, comparison: Comparison) -> Finding:
    """The finding that copies differ, by more than a rounding or only by that. A collective of all ranks.

    Reads the first tensor whole, and the others that have names, piece by piece, until a difference is no rounding.
    Where more tensors differ than have names, the others are not read, and the finding is not said to be of rounding.
    """
    mismatches = copies.gather_mismatches(comparison)
    first, *others = mismatches
    difference = _measure(copies, first)
    is_rounding = (
        difference.is_rounding
        and len(comparison.numbers) == len(mismatches)
        and all(_measure(copies, one, stops=True).is_rounding for one in others)
    )
    return Finding(
        ROUNDING if is_rounding else DIFFERENT,
        [one.name for one in mismatches],
        len(comparison.numbers),
        f"of the first, {_describe_groups(first)} ({difference})",
    )


def _describe_groups(mismatch: Mismatch) -> str:
    ranks_of: dict[int, list[int]] = {}
    for rank, total in mismatch.sums.items():
        ranks_of.setdefault(total, []).append(rank)
    first, *others = sorted(ranks_of.values(), key=len, reverse=True)
    said = [*map(describe_ranks, others[:2]), *([f"{len(others) - 2} more groups"] if len(others) > 2 else [])]
    if len(first) == len(others[0]):  # nothing says which are right
        return " and ".join([describe_ranks(first), *said]) + " differ"
    return f"{describe_ranks(first)} agree; {' and '.join(said)} differ{'s' * (others == [others[0][:1]])}"


@torch.no_grad()
def _measure(copies: Copies, mismatch: Mismatch, stops: bool = False) -> Difference:
    """The difference of all copies; with `stops` that of the pieces up to the first one that is no rounding.

    A collective of all ranks, with an all-reduce of 8 MB at most for each piece; what lies beside the tensor takes
    less than 64 MB. A rank without the tensor takes part.
    """
    mine = copies.find(mismatch.name)
    flat = None if mine is None else mine.detach().reshape(-1)
    is_float = mismatch.dtype.is_floating_point
    difference = Difference(0.0, 0 if is_float else None)
    length = PIECE // 4
    for start in range(0, mismatch.size, length):
        bounds = torch.full((2, min(length, mismatch.size - start)), _LEAST, dtype=torch.int64, device=copies.device)
        if flat is not None:
            bounds[0] = _to_steps(flat[start : start + length].to(mismatch.dtype))
            bounds[1] = ~bounds[0]
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        most, least = bounds[0], bounds[1].bitwise_not_()
        amounts = _to_values(most, mismatch.dtype) - _to_values(least, mismatch.dtype)
        # The difference of an inf from the same one is NaN, and none; that of a NaN from a number counts as inf.
        amount = amounts.masked_fill_(most == least, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf).max()
        steps = most - least
        ulps = steps.masked_fill_(steps < 0, torch.iinfo(torch.int64).max).max()  # an overflow, of two signs in fp64
        difference = Difference(
            max(difference.amount, float(amount)),
            None if difference.ulps is None else max(difference.ulps, int(ulps)),
        )
        if stops and not difference.is_rounding:
            break
    return difference


def _to_steps(values: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers as integers in their order, so that neighbours differ by 1; integers as they are."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    bits = view_bits(values).to(torch.int64)
    return torch.where(bits < 0, _sign_bit(values.dtype) - bits, bits)


def _to_values(steps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `_to_steps` has got, in fp64."""
    if not dtype.is_floating_point:
        return steps.double()
    bits = torch.where(steps < 0, _sign_bit(dtype) - steps, steps)
    return bits.to(INTEGERS[dtype.itemsize]).view(dtype).double()


def _sign_bit(dtype: torch.dtype) -> int:
    return -(1 << 8 * dtype.itemsize - 1)
