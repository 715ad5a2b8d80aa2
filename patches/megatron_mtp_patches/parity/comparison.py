"""Puts what the ranks of a cut have recorded together, and compares it with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .gradients import Parts
from .hidden_states import HiddenStates
from .training import Printed, Record

# In the order of a step. They say where a deviation begins; what is computed of them is compared anyway.
HIDDEN = ("hidden state", "gradient of the hidden state")
SMALL = 1e-3  # of the largest norm: below it a weight's own norm is no measure


class Whole(NamedTuple):
    """A tensor of each name, put together, and how far the copies of an entry differ."""

    values: dict[str, torch.Tensor]
    copies: dict[str, float]


class Deviation(NamedTuple):
    """How far a quantity of a cut is from that of the reference, as a part of it.

    Attributes:
        step: counted from 1.
        kind: "loss", "gradient norm", "log", "gradient", "update", "buffer", "weight", "random state" or "copies"; or
            one of HIDDEN.
        name: of the loss, metric, weight, buffer or hidden state; the rank of a gradient norm.
        size: relative; infinite where one of the two lacks it.
    """

    step: int
    kind: str
    name: str
    size: float

    def __str__(self) -> str:
        what = f"copies of the {self.name}" if self.kind == "copies" else f"{self.kind} {self.name}"
        size = "absent in one of the two" if self.size == float("inf") else f"off by {self.size:.2g} times its size"
        return f"{what}, step {self.step}: {size}"


def merge(ranks: list[Parts]) -> Whole:
    """Put the parts of all ranks together. Entries that no rank has are NaN."""
    values: dict[str, torch.Tensor] = {}
    copies: dict[str, float] = {}
    for parts in ranks:
        for name, shards in parts.items():
            for shape, region, part in shards:
                whole = values.setdefault(name, torch.full(shape, torch.nan))
                before = whole[region].clone()
                apart = torch.nan_to_num(before - part.reshape(before.shape), nan=0.0).abs().max()
                copies[name] = max(copies.get(name, 0.0), float(apart))
                whole[region] = part.reshape(before.shape)
    scale = {name: float(torch.nan_to_num(value).abs().max()) for name, value in values.items()}
    return Whole(values, {name: apart / (scale[name] or 1.0) for name, apart in copies.items() if apart})


def compare(reference: list[Record], cut: list[Record]) -> Iterator[Deviation]:
    """Yield how far each quantity of a cut is from that of the reference; those of HIDDEN in the order of a step.

    The reference has one rank, or the ranks of the same cut.
    """
    for index in range(len(reference[0].norms)):
        step = index + 1
        yield from _compare_hidden(step, *([record.hidden for record in ranks] for ranks in (reference, cut)))
        one, other = (_of_any_rank([record.losses[index] for record in ranks]) for ranks in (reference, cut))
        for name, value in one.items():
            yield Deviation(step, "loss", name, _worst(value, other.get(name)))
        for rank, record in enumerate(cut):
            norm = reference[rank if len(reference) == len(cut) else 0].norms[index]
            yield Deviation(step, "gradient norm", f"of rank {rank}", _apart(norm, record.norms[index]))
        lines = reference[-1].lines[index], cut[-1].lines[index]
        compared = {"grad norm", *one}  # above, with more digits than a line has
        for name in sorted((lines[0].keys() | lines[1].keys()) - compared):
            yield Deviation(step, "log", name, _apart_as_printed(*(line.get(name) for line in lines)))
        for kind, parts in (("gradient", "gradients"), ("buffer", "buffers")):
            whole, others = (merge([getattr(record, parts)[index] for record in ranks]) for ranks in (reference, cut))
            yield from _compare_tensors(step, kind, whole, others)
    whole, others = (merge([_first_update(record) for record in ranks]) for ranks in (reference, cut))
    unit = merge([record.gradients[0] for record in reference])
    yield from _compare_tensors(1, "update", whole, others, unit)


def compare_weights(reference: list[Record], cut: list[Record]) -> Iterator[Deviation]:
    """Yield how far the weights before the first step are from those of the reference."""
    whole, others = (merge([record.weights[0] for record in ranks]) for ranks in (reference, cut))
    yield from _compare_tensors(1, "weight", whole, others)


def compare_random_states(reference: list[Record], cut: list[Record]) -> Iterator[Deviation]:
    """Yield the random generators whose states in the first step are others than on the same rank of the reference."""
    for rank, (one, other) in enumerate(zip(reference, cut, strict=True)):
        for name in sorted(one.random[0].keys() | other.random[0].keys()):
            if one.random[0].get(name) != other.random[0].get(name):
                yield Deviation(1, "random state", f"of {name} on rank {rank}", 1.0)


def _first_update(record: Record) -> Parts:
    """What the first step has added to the weights of a rank, as the second one meets them."""
    before, after = record.weights[:2]
    return {
        name: [(shape, region, new - old[2]) for (shape, region, new), old in zip(after[name], parts, strict=True)]
        for name, parts in before.items()
    }


def _compare_hidden(step: int, one: list[HiddenStates], other: list[HiddenStates]) -> Iterator[Deviation]:
    for kind, name in zip(HIDDEN, ("states", "gradients"), strict=True):
        wholes = [merge([getattr(hidden, name).get(step, {}) for hidden in ranks]).values for ranks in (one, other)]
        for key in (key for key in wholes[0] if key in wholes[1]):
            apart = float((wholes[0][key] - wholes[1][key]).norm()) / max(float(wholes[0][key].norm()), 1e-30)
            yield Deviation(step, kind, key, float("inf") if apart != apart else apart)


def _compare_tensors(step: int, kind: str, one: Whole, other: Whole, unit: Whole | None = None) -> Iterator[Deviation]:
    """Yield the norms of differences, as parts of the norm of the reference or of `unit`."""
    norms = {name: float(value.norm()) for name, value in (unit or one).values.items()}
    largest = max(norms.values(), default=0.0)
    for name in sorted(one.values.keys() | other.values.keys()):
        if name in one.values and name in other.values:
            apart = float((one.values[name] - other.values[name]).norm())
            size = apart / max(norms.get(name, 0.0), SMALL * largest, 1e-30)
            yield Deviation(step, kind, name, float("inf") if size != size else size)
        else:
            yield Deviation(step, kind, name, float("inf"))
    for name, apart in other.copies.items():
        yield Deviation(step, "copies", f"{kind} {name}", max(0.0, apart - one.copies.get(name, 0.0)))


def _of_any_rank(losses: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The losses of the last rank that has them."""
    return {name: value for some in losses for name, value in some.items()}


def _worst(one: list[float], other: list[float] | None) -> float:
    return max((_apart(x, y) for x, y in zip(one, other, strict=True)), default=0.0) if other else float("inf")


def _apart_as_printed(one: Printed | None, other: Printed | None) -> float:
    """Nothing where only the last digits differ, by one."""
    if one and other and abs(one.value - other.value) < 1.5 * max(one.unit, other.unit):
        return 0.0
    return _apart(one and one.value, other and other.value)


def _apart(one: float | None, other: float | None) -> float:
    """How far two numbers are apart, as a part of the larger one."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
