"""Compares copies over all ranks: a table of names that is made once, and one all-reduce for each comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_overrides.watch.bits import sum_bits
from megatron_overrides.watch.tensors import Watched

_LEAST = torch.iinfo(torch.int64).min


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


class Copies:
    """The tensors of this rank of which other ranks have copies. Its methods are collectives of all ranks.

    Args:
        tensors: of this rank; a name that stands twice is compared once.
        device: where the sums are reduced.

    Attributes:
        size: how many tensors several ranks have.
        first_held: those of which no rank before this one has a copy.
    """

    def __init__(self, tensors: Iterable[Watched], device: torch.device) -> None:
        self.device = device
        mine = {tensor.name: tensor for tensor in tensors}
        shared = _find_shared(sorted(mine), device)
        self.size = len(shared)
        self._names = shared
        self._mine = [(number, mine[name]) for number, name in enumerate(shared) if name in mine]
        holders = torch.full((self.size,), dist.get_world_size(), dtype=torch.int64, device=device)
        for number, _ in self._mine:
            holders[number] = dist.get_rank()
        dist.all_reduce(holders, op=dist.ReduceOp.MIN)
        first = dict(zip(shared, holders.tolist(), strict=True))
        self.first_held = [one for name, one in mine.items() if first.get(name, dist.get_rank()) == dist.get_rank()]

    def compare(self) -> list[Mismatch]:
        """Return the copies that differ, the same on all ranks.

        Reads each tensor once, has one all-reduce of 16 bytes for each shared tensor of the whole model, and one read
        on the host; names and sums are gathered only if copies differ.
        """
        sums = torch.full((2, self.size), _LEAST, dtype=torch.int64, device=self.device)
        for number, tensor in self._mine:
            value = tensor.read()
            if value is not None:
                total = sum_bits(value).to(self.device)
                sums[0, number], sums[1, number] = total[0], ~total[0]
        most = sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        # The largest sum is the smallest one, or no rank has the tensor now.
        differs = (most[0] != ~most[1]) & (most[0] != _LEAST)
        numbers = differs.nonzero().flatten().tolist()
        return self._name(numbers, sums[0]) if numbers else []

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of a mismatch; None where this rank has none."""
        return next((tensor.read() for number, tensor in self._mine if self._names[number] == name), None)

    def _name(self, numbers: list[int], sums: torch.Tensor) -> list[Mismatch]:
        differing = set(numbers)
        mine: dict[int, tuple[int, torch.dtype, int]] = {}
        for number, tensor in self._mine:
            if number in differing and (value := tensor.read()) is not None:
                mine[number] = int(sums[number]), value.dtype, value.numel()
        gathered: list[dict[int, tuple[int, torch.dtype, int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        mismatches = []
        for number in numbers:
            copies = {rank: one[number] for rank, one in enumerate(gathered) if number in one}
            _, dtype, size = next(iter(copies.values()))
            totals = {rank: total for rank, (total, _, _) in copies.items()}
            mismatches.append(Mismatch(self._names[number], totals, dtype, size))
        return mismatches


def _find_shared(names: list[str], device: torch.device) -> list[str]:
    """The names that several ranks have, in an order that is the same on all of them.

    Each rank sends a digest of its names; each list of names is sent once, by the first rank that has it.
    """
    digest = int.from_bytes(blake2b("\n".join(names).encode(), digest_size=8).digest(), "big", signed=True)
    digests = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    digests[dist.get_rank()] = digest
    dist.all_reduce(digests)
    holders = Counter(digests.tolist())
    count: Counter[str] = Counter()
    for rank, one in enumerate(digests.tolist()):
        if one in holders:
            sent = [names]
            dist.broadcast_object_list(sent, src=rank, device=device)
            for name in sent[0]:
                count[name] += holders[one]
            del holders[one]
    return sorted(name for name, ranks in count.items() if ranks > 1)
