"""The tables of ci/acceptance and ci/starts."""

from __future__ import annotations

from typing import Any

from scripts.common.markdown import Table

Runs = dict[str, list[dict[str, Any]]]  # by loss: the accepted lengths with each seed

COMPARED = ("greedy, decoded", "greedy, held out", "sampled, decoded", "sampled, held out")
CHECKED = ("greedy, from every position", "greedy, logged", "sampled, from every position", "sampled, logged")


def losses(runs: Runs, note: str = "") -> Table:
    """A row for each loss: the means over the seeds, the lowest and the highest."""
    rows = [[loss, *(_spread([run[name] for run in seeds]) for name in COMPARED)] for loss, seeds in runs.items()]
    return Table("Accepted lengths by each loss", ["tokens per step", *COMPARED], rows, range(1, 5), note=note)


def logged(runs: Runs, note: str = "") -> Table:
    """A row for each loss: what the log says beside what a decoder accepts, with the first seed."""
    rows = [[loss, *(f"{seeds[0][name]:.3f}" for name in CHECKED)] for loss, seeds in runs.items()]
    return Table("Accepted lengths, logged and decoded", ["tokens per step", *CHECKED], rows, range(1, 5), note=note)


def _spread(numbers: list[float]) -> str:
    return f"{sum(numbers) / len(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


def starts(curves: dict[str, list[tuple[int, float]]], note: str = "") -> Table:
    """A row for each start, a column for the steps at which the accepted length was measured."""
    steps = [str(step) for step, _ in next(iter(curves.values()))]
    columns = ["`--mtp-init`, accepted length after steps", *steps]
    rows = [[start, *(f"{length:.3f}" for _, length in curve)] for start, curve in curves.items()]
    return Table("Starts of MTP heads", columns, rows, range(1, len(columns)), note=note)
