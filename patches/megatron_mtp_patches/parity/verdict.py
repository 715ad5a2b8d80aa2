"""What a deviation means: within the tolerance, a dependence that Megatron defines, or a finding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .comparison import HIDDEN, Deviation
from .legitimate import Dependence, find_dependence

# By which each weight is moved, as a part of itself, to measure the spread of the reference: in bf16 by its rounding.
STEP = {"fp32": 1e-6, "bf16": 2.0**-8}
FACTOR = 10.0  # of that spread; a cut adds in another order, which in fp32 moves numbers by a tenth of it
FLOOR = 1e-5  # where the spread is zero
TOO_FAR = {"fp32": 1e-3, "bf16": 0.1}  # a spread that only another choice of experts makes: weights are drawn again


class Tolerance:
    """How far each kind of quantity, and each number of the log, may deviate in each step.

    Args:
        spread: the deviations of the reference with slightly moved weights from the reference itself.
        dtype: of the run, "fp32" or "bf16".
    """

    def __init__(self, spread: Iterable[Deviation], dtype: str = "fp32") -> None:
        self.dtype = dtype
        self.largest: dict[tuple[int, str, str], float] = {}
        self.widen(spread)

    def widen(self, spread: Iterable[Deviation]) -> None:
        """Add the deviations of another slight move."""
        for one in spread:
            key = one.step, one.kind, one.name if one.kind == "log" else ""
            self.largest[key] = max(self.largest.get(key, 0.0), one.size)

    @property
    def is_steady(self) -> bool:
        """Whether a small change of the weights makes a small change of the gradients."""
        return all(size < TOO_FAR[self.dtype] for (_, kind, _), size in self.largest.items() if kind == "gradient")

    def of(self, deviation: Deviation) -> float:
        """The largest size of such a deviation that is none."""
        kind = "gradient" if deviation.kind == "copies" else deviation.kind
        key = deviation.step, kind, deviation.name if kind == "log" else ""
        return max(FACTOR * self.largest.get(key, 0.0), FLOOR)


class Verdict(NamedTuple):
    """What is said of a cut.

    Attributes:
        findings: the deviations beyond the tolerance, step by step, the largest first.
        dependences: those that Megatron defines, with the reason.
        begins: the first hidden state that deviates, or gradient of one, in the order of a step; None where something
            else deviates in an earlier step.
    """

    findings: list[Deviation]
    dependences: dict[Dependence, list[Deviation]]
    begins: Deviation | None = None


def judge(deviations: Iterable[Deviation], tolerance: Tolerance, *runs: object) -> Verdict:
    """Sort the deviations of a cut; `runs` are the arguments of runs in which Megatron may define one so."""
    findings: list[Deviation] = []
    dependences: dict[Dependence, list[Deviation]] = {}
    beyond = [one for one in deviations if one.size > tolerance.of(one)]
    for deviation in sorted(beyond, key=lambda one: (one.step, -one.size)):
        if deviation.kind not in HIDDEN:
            dependence = next(filter(None, (find_dependence(deviation, run) for run in runs)), None)
            if dependence is None:
                findings.append(deviation)
            else:
                dependences.setdefault(dependence, []).append(deviation)
    first_step = findings[0].step if findings else 0
    begins = next((one for one in beyond if one.kind in HIDDEN and one.step <= first_step), None)
    return Verdict(findings, dependences, begins)
