"""A schedule of the weight of the MTP loss: its points, and the weight of a training step."""

from __future__ import annotations

import bisect
from fractions import Fraction
from typing import NamedTuple

from megatron_overrides.settings.checks import spell

NAME = "mtp_loss_scaling_schedule"
STYLE = f"{NAME}_style"


class Progress(NamedTuple):
    """The progress of a run before a training step.

    Attributes:
        iterations: the iterations before this step. Those whose update was skipped count.
        share: what part of the run's samples or, if its length is in iterations, of its iterations is done; None if the
            trainer knows neither number.
    """

    iterations: int
    share: Fraction | None = None

    @classmethod
    def of_run(cls, iterations: int, samples: int, train_iters: int | None, train_samples: int | None) -> Progress:
        """The progress of a run that has a length in samples, in iterations, or none."""
        if train_samples:
            return cls(iterations, Fraction(samples, train_samples))
        return cls(iterations, Fraction(iterations, train_iters) if train_iters else None)


class Schedule(NamedTuple):
    """The weight from each point on, until the next one.

    Attributes:
        starts: the points, in per cent of the run or in iterations. They begin at 0 and ascend. Fractions, because the
            step in which the weight changes must not depend on rounding.
        weights: the weight at each point.
        is_percent: whether the points are in per cent.
        is_linear: whether the weight goes from point to point in a straight line, and not in steps.
    """

    starts: tuple[Fraction, ...]
    weights: tuple[float, ...]
    is_percent: bool
    is_linear: bool

    @classmethod
    def parse(cls, text: str, style: str = "step") -> Schedule:
        """Read "0:0.3,60%:0.1".

        Raises:
            ValueError: it cannot be read, or cannot be meant.
        """
        try:
            words = [point.partition(":")[::2] for point in text.split(",")]
            starts = [Fraction(start.strip().removesuffix("%")) for start, _ in words]
            weights = [float(weight) for _, weight in words]
        except (AttributeError, ValueError, ZeroDivisionError):
            raise _refusal(text, "it cannot be read as points") from None
        units = {"%" in word for (word, _), start in zip(words, starts, strict=True) if start}
        is_percent = True in units
        if starts[0] != 0:
            raise _refusal(text, "the first point is not 0")
        if any(start >= following for start, following in zip(starts, starts[1:], strict=False)):
            raise _refusal(text, "the points do not ascend")
        if len(units) > 1:
            raise _refusal(text, "some points are in per cent, others in iterations")
        if is_percent and starts[-1] > 100:
            raise _refusal(text, "a point is over 100 %")
        if not is_percent and any(start.denominator != 1 for start in starts):
            raise _refusal(text, "a point is no whole number of iterations")
        if not all(0 <= weight < float("inf") for weight in weights):
            raise _refusal(text, "a weight is negative, or is no finite number")
        return cls(tuple(starts), tuple(weights), is_percent, style == "linear")

    def weight(self, progress: Progress) -> float:
        """Return the weight of the step that follows `progress`.

        Raises:
            ValueError: the points are in per cent of a run whose length its trainer does not know.
        """
        position = self._position(progress)
        index = bisect.bisect_right(self.starts, position) - 1
        start, weight = self.starts[index], self.weights[index]
        if not self.is_linear or index + 1 == len(self.starts):
            return weight
        covered = (position - start) / (self.starts[index + 1] - start)
        return weight + float(covered) * (self.weights[index + 1] - weight)

    def _position(self, progress: Progress) -> Fraction:
        if not self.is_percent:
            return Fraction(progress.iterations)
        if progress.share is None:
            raise ValueError(
                f"{spell(NAME)} has points in per cent, but this run has neither a number of train iterations nor of "
                f"samples: give the points in iterations"
            )
        return 100 * progress.share


def _refusal(text: object, reason: str) -> ValueError:
    return ValueError(
        f"{spell(NAME)} {text!r}: {reason}. Give points START:WEIGHT with commas between them, as in 0:0.3,60%:0.1. "
        f"They begin at 0 and ascend, all in iterations or all in per cent of the run; weights are 0 or more"
    )
