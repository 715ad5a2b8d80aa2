"""The gradients of the whole model, each counted by one rank: their norms, and which weights have none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP
from megatron_overrides.watch.findings import Finding
from megatron_overrides.watch.tensors import Watched
from megatron_overrides.watch.weights import HEADS

CHECKS = 3  # so many without a gradient are named


class Gradients:
    """The gradients that this rank counts. `measure` and `find_missing` are collectives of all ranks.

    Args:
        tensors: the gradients of which this rank is the first holder.
        device: where they are reduced.
    """

    def __init__(self, tensors: Iterable[Watched], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self._checks_without: Counter[str] = Counter()

    def measure(self) -> dict[str | None, float]:
        """Return the L2 norm of all gradients but those of MTP heads under None, and that of the heads.

        Reads each gradient once; one all-reduce of 16 bytes.
        """
        squares = torch.zeros(len(self._tensors), dtype=torch.float64, device=self._device)
        for number, tensor in enumerate(self._tensors):
            if (value := tensor.read()) is not None:
                squares[number] = torch.linalg.vector_norm(value, dtype=torch.float32).double().square()
        is_head = torch.tensor(
            [tensor.weight.startswith(HEADS) for tensor in self._tensors], dtype=torch.bool, device=self._device
        )
        totals = torch.stack([squares[~is_head].sum(), squares[is_head].sum()])
        dist.all_reduce(totals)
        main, heads = totals.sqrt().tolist()
        self._count_missing(squares.tolist(), counts_main=main > 0.0, counts_heads=main + heads > 0.0)
        return {None: main, MTP_GRAD_NORM_GROUP: heads}

    def find_missing(self, with_heads: bool) -> list[Finding]:
        """Return as a finding the weights of which no rank has had a gradient in the last checks.

        Those of MTP heads are among them only `with_heads`: the weight of their loss may be 0.

        A rank asks the others once, when its part of a weight has had none in so many: that of a word embedding may
        be of words that do not occur, and that of an expert of one that gets no tokens.
        """
        asked = {
            one.weight
            for one in self._tensors
            if self._checks_without[one.name] == CHECKS and (with_heads or not one.weight.startswith(HEADS))
        }
        is_asked = torch.tensor([len(asked)], device=self._device)
        dist.all_reduce(is_asked, op=dist.ReduceOp.MAX)
        if not int(is_asked):
            return []
        everywhere = _unite(asked)
        has_one = {one.weight for one in self._tensors if self._checks_without[one.name] < CHECKS}
        missing = everywhere - _unite(everywhere & has_one)
        text = f"no rank has had a gradient of the first in {CHECKS} checks"
        return [Finding("a weight has no gradient", sorted(missing), len(missing), text)] if missing else []

    def _count_missing(self, squares: list[float], counts_main: bool, counts_heads: bool) -> None:
        """Count a check without a gradient, but not where no weight has one: GRPO may have no advantages in a batch."""
        for tensor, square in zip(self._tensors, squares, strict=True):
            if not (counts_heads if tensor.weight.startswith(HEADS) else counts_main):
                continue
            value = None if square else tensor.read()  # the square of a tiny gradient is 0 as well
            is_missing = not square and (value is None or not value.any())
            self._checks_without[tensor.name] = is_missing * (self._checks_without[tensor.name] + 1)


def select_norms(
    measured: dict[str | None, float], reported: dict[str | None, Any], has_own_group: bool
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, reported, measured) of the norms that have to agree.

    Args:
        measured: as Gradients.measure returns it.
        reported: by the update; the main one under None.
        has_own_group: the heads are clipped by their own norm.
    """
    if set(reported) - {None, MTP_GRAD_NORM_GROUP}:  # groups of --grad-norm-group, which only their sum can be asked of
        yield "norm of all groups", math.hypot(*map(float, reported.values())), math.hypot(*measured.values())
    elif has_own_group:
        yield "gradient norm", float(reported[None]), measured[None]
        yield "gradient norm of MTP heads", float(reported.get(MTP_GRAD_NORM_GROUP, 0.0)), measured[MTP_GRAD_NORM_GROUP]
    else:
        yield "gradient norm", float(reported[None]), math.hypot(*measured.values())


def _unite(names: set[str]) -> set[str]:
    """The names of all ranks."""
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return set().union(*gathered)
