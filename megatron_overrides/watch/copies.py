"""Compares copies over all ranks: a table of hashed names that is made once, and one all-reduce each time."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overrides.watch.bits import sum_bits
from megatron_overrides.watch.tensors import GRADIENT, Watched

_LEAST = torch.iinfo(torch.int64).min
# Copies of weights are named before what differs because of them.
_ORDER = ("weight ", "buffer ", "main weight ", GRADIENT, "")
MOST = 64  # mismatches whose names are gathered


class Mismatch(NamedTuple):
    """Copies that differ.

    Attributes:
        name: of the tensor.
        sums: {rank: the sum of the bits of its copy}, of all ranks that have one.
        dtype: of the copy of the first of them.
        size: the number of elements of each copy.
    """

    name: str
    sums: dict[int, int]
    dtype: torch.dtype
    size: int


class Comparison(NamedTuple):
    """What came of comparing all copies.

    Attributes:
        numbers: of the tensors whose copies differ; the same on all ranks.
        sums: of the bits of this rank's tensors, by their numbers.
    """

    numbers: list[int]
    sums: torch.Tensor


class Copies:
    """The tensors of this rank of which other ranks have copies. Its methods are collectives of all ranks.

    Args:
        tensors: of this rank; a name that stands twice is compared once.
        device: where the sums are reduced.

    Attributes:
        size: how many tensors several ranks have.
        alone: the tensors of this rank that no other one has.
        first_held: those of which no rank before this one has a copy.
    """

    def __init__(self, tensors: Iterable[Watched], device: torch.device) -> None:
        self.device = device
        mine = {_hash(tensor.name): tensor for tensor in tensors}
        shared = _find_shared(list(mine), device)
        self.size = len(shared)
        numbers = {hashed: number for number, hashed in enumerate(shared)}
        self._mine = {numbers[hashed]: tensor for hashed, tensor in mine.items() if hashed in numbers}
        holders = torch.full((self.size,), dist.get_world_size(), dtype=torch.int64, device=device)
        holders[list(self._mine)] = dist.get_rank()
        dist.all_reduce(holders, op=dist.ReduceOp.MIN)
        is_first = (holders == dist.get_rank()).tolist()
        self.alone = [one for hashed, one in mine.items() if hashed not in numbers]
        self.first_held = [*self.alone, *(one for number, one in self._mine.items() if is_first[number])]

    def compare(self) -> Comparison:
        """Compare all copies.

        Reads each tensor once, has one all-reduce of 16 bytes for each shared tensor of the whole model, and one read
        on the host.
        """
        sums = torch.full((2, self.size), _LEAST, dtype=torch.int64, device=self.device)
        for number, tensor in self._mine.items():
            value = tensor.read()
            if value is not None:
                total = sum_bits(value).to(self.device)
                sums[0, number], sums[1, number] = total[0], ~total[0]
        most = sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        # The largest sum is the smallest one, or no rank has the tensor now.
        differs = (most[0] != ~most[1]) & (most[0] != _LEAST)
        numbers = differs.nonzero().flatten().tolist()
        return Comparison(numbers, sums[0])

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of a mismatch; None where this rank has none."""
        return next((tensor.read() for tensor in self._mine.values() if tensor.name == name), None)

    def gather_mismatches(self, comparison: Comparison) -> list[Mismatch]:
        """The first MOST of the tensors that differ, in the order in which they are named; the same on all ranks.

        One all-reduce of 8 bytes for each tensor that differs, and a gathering of their names and sums.
        """
        numbers = self._choose(comparison.numbers)
        mine: dict[int, tuple[str, int, torch.dtype, int]] = {}
        for number in numbers:
            tensor = self._mine.get(number)
            if tensor is not None and (value := tensor.read()) is not None:
                mine[number] = tensor.name, int(comparison.sums[number]), value.dtype, value.numel()
        gathered: list[dict[int, tuple[str, int, torch.dtype, int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        mismatches = []
        for number in numbers:
            copies = {rank: one[number] for rank, one in enumerate(gathered) if number in one}
            name, _, dtype, size = next(iter(copies.values()))
            mismatches.append(Mismatch(name, {rank: total for rank, (_, total, *_) in copies.items()}, dtype, size))
        return sorted(mismatches, key=lambda one: (_place_in_order(one.name), one.name))

    def _choose(self, numbers: list[int]) -> list[int]:
        """The first of these, in the order in which they are named, which only ranks that have them know."""
        mine = [self._mine.get(number) for number in numbers]
        ours = [len(_ORDER) if tensor is None else _place_in_order(tensor.name) for tensor in mine]
        places = torch.tensor(ours, device=self.device)
        dist.all_reduce(places, op=dist.ReduceOp.MIN)
        return [numbers[index] for index in places.argsort(stable=True).tolist()[:MOST]]


def _place_in_order(name: str) -> int:
    return next(place for place, kind in enumerate(_ORDER) if name.startswith(kind))


def _hash(name: str) -> int:
    """64 bits of a name; of 30 million names two have the same ones in one run of 40,000."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def _find_shared(hashes: list[int], device: torch.device) -> list[int]:
    """The hashes that several ranks have, in an order that is the same on all of them.

    One all-gather of 8 bytes for each tensor of each rank.
    """
    size = torch.tensor([len(hashes)], device=device)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, size)
    mine = torch.zeros(int(sizes.max()), dtype=torch.int64, device=device)
    mine[: len(hashes)] = torch.tensor(hashes, dtype=torch.int64, device=device)
    gathered = torch.empty(len(sizes) * len(mine), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    is_padding = torch.arange(len(mine), device=device) >= sizes[:, None]
    values, counts = gathered[~is_padding.flatten()].unique(return_counts=True)
    return values[counts > 1].tolist()
