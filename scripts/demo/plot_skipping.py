"""Draw both runs: the loss on text, the MTP head's loss, and the gradient norm that decides."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from curves import Curves, without
from matplotlib.axes import Axes

SHARED, BEFORE, AFTER, ACCIDENT, NOTE = "#8a8a8a", "#c8452f", "#1f6fb2", "#f3e6c8", "#8a6d1f"
WINDOW = 5
EARLIER = 60  # iterations shown before the checkpoint; the steep start would flatten everything else

Line = tuple[list[int], list[float]]


def smooth(curve: dict[int, float]) -> Line:
    """A trailing mean that starts anew after a gap, so that a jump shows at once and in full."""
    iterations: list[int] = []
    means: list[float] = []
    recent: list[float] = []
    for iteration in sorted(curve):
        if iterations and iteration > iterations[-1] + 1:
            iterations.append(iteration - 1)
            means.append(math.nan)
            recent = []
        recent = [*recent[1 - WINDOW :], curve[iteration]]
        iterations.append(iteration)
        means.append(sum(recent) / len(recent))
    return iterations, means


def bursts(iterations: frozenset[int]) -> list[tuple[int, int]]:
    """First and last iteration of each run of consecutive ones."""
    spans: list[tuple[int, int]] = []
    for iteration in sorted(iterations):
        if spans and iteration == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], iteration)
        else:
            spans.append((iteration, iteration))
    return spans


def draw(shared: Curves, before: Curves, after: Curves, corrupt: frozenset[int], threshold: float, path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (loss, mtp, norm) = plt.subplots(
        3, 1, figsize=(9.5, 9), sharex=True, height_ratios=(3, 2, 2), layout="constrained"
    )
    figure.suptitle(
        "A bad batch sets training back; skipping its update does not",
        x=0.01,
        ha="left",
        fontsize=15,
        weight="bold",
    )
    fork = max(shared.loss)
    spans = bursts(corrupt)
    for axes in (loss, mtp, norm):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for start, end in spans:
            axes.axvspan(start - 0.5, end + 0.5, color=ACCIDENT, linewidth=0)

    lines = _draw_loss(loss, fork, corrupt, shared.loss, before.loss, after.loss)
    loss.set_title(f"loss on text, mean of {WINDOW} iterations", loc="left", fontsize=10.5)
    _name_lines(loss, lines, spans)
    _draw_loss(mtp, fork, corrupt, shared.mtp_loss, before.mtp_loss, after.mtp_loss)
    mtp.set_title(f"loss of the MTP head on text, mean of {WINDOW} iterations", loc="left", fontsize=10.5)
    _draw_norm(norm, fork, threshold, shared.grad_norm, before.grad_norm, after.grad_norm)
    norm.set_title("gradient norm before clipping", loc="left", fontsize=10.5)
    norm.set_xlabel("iteration")
    norm.set_xlim(fork - EARLIER, max(after.loss) + 1)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_loss(
    axes: Axes,
    fork: int,
    corrupt: frozenset[int],
    shared: dict[int, float],
    before: dict[int, float],
    after: dict[int, float],
) -> tuple[Line, Line]:
    """Both continuations grow out of the shared line. Returns them."""
    iterations, values = smooth(shared)
    axes.plot(iterations, values, color=SHARED, linewidth=1.8, zorder=3)
    lines = []
    visible = values[-EARLIER:]
    for curve, colour in ((before, BEFORE), (after, AFTER)):
        iterations, values = smooth({**shared, **without(curve, corrupt)})
        start = iterations.index(fork)
        lines.append((iterations[start:], values[start:]))
        axes.plot(*lines[-1], color=colour, linewidth=1.8)
        visible += [value for value in lines[-1][1] if not math.isnan(value)]
    margin = (max(visible) - min(visible)) * 0.12
    axes.set_ylim(min(visible) - margin, max(visible) + margin)
    axes.set_ylabel("bits per byte")
    return lines[0], lines[1]


def _name_lines(axes: Axes, lines: tuple[Line, Line], spans: list[tuple[int, int]]) -> None:
    """Name both right after the first burst, where they are furthest apart, and the burst itself."""
    start, end = spans[0]
    before, after = (dict(zip(*line, strict=True)) for line in lines)
    named = {"color": BEFORE, "weight": "bold", "textcoords": "offset points"}
    where = end + 4
    axes.annotate("no threshold", (where, before[where]), xytext=(12, 8), **named)
    named["color"] = AFTER
    below = min(after[iteration] for iteration in range(end + 1, end + 40))
    axes.annotate("updates skipped", (end + 1, below), xytext=(0, -16), **named)
    axes.annotate(
        f"{end - start + 1} batches arrive\nstill compressed",
        (start - 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=NOTE,
    )


def _draw_norm(
    axes: Axes,
    fork: int,
    threshold: float,
    shared: dict[int, float],
    before: dict[int, float],
    after: dict[int, float],
) -> None:
    for curve, colour in ((shared, SHARED), (before, BEFORE), (after, AFTER)):
        iterations = sorted(curve)
        axes.plot(iterations, [curve[iteration] for iteration in iterations], color=colour, linewidth=1.2)
    skipped = {iteration: value for iteration, value in after.items() if not value <= threshold}
    axes.scatter(list(skipped), list(skipped.values()), s=16, color=AFTER, zorder=3)
    axes.axhline(threshold, color="#444444", linewidth=1, linestyle=(0, (4, 3)))
    named = {"textcoords": "offset points", "ha": "left"}
    where = (fork - EARLIER, threshold)
    axes.annotate(f"--grad-norm-skip-threshold {threshold:g}", where, xytext=(4, 5), color="#444444", **named)
    if skipped:
        first = bursts(frozenset(skipped))[0][1]
        label = f"{len(skipped)} updates skipped"
        axes.annotate(label, (first, skipped[first]), xytext=(8, -3), color=AFTER, weight="bold", **named)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("norm")
