"""Draw what the experiments show: losses, and the gradient norms that decide."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .runs import Curves

HEADS, SKIPPING, LOSSES = "detached_mtp_heads.png", "skip_large_grad_norm.png", "accepted_length.png"
RED, YELLOW, BLUE, GREY, DARK = "#c8452f", "#c99700", "#1f6fb2", "#8a8a8a", "#444444"
ACCIDENT, NOTE = "#f3e6c8", "#8a6d1f"
DASHED = (0, (4, 3))
WINDOW = 5  # iterations of a mean
STEEP = 15  # iterations left out of the losses: the steep start would flatten everything else
EARLIER = 60  # iterations shown before the checkpoint, for the same reason

Curve = dict[int, float]
Line = tuple[list[int], list[float]]


def without(curve: Curve, iterations: Collection[int]) -> Curve:
    return {iteration: value for iteration, value in curve.items() if iteration not in iterations}


def smooth(curve: Curve) -> Line:
    """A trailing mean that starts again after a gap, so that a jump shows at once and in full."""
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


def bursts(iterations: Collection[int]) -> list[tuple[int, int]]:
    """First and last iteration of each run of consecutive ones."""
    spans: list[tuple[int, int]] = []
    for iteration in sorted(iterations):
        if spans and iteration == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], iteration)
        else:
            spans.append((iteration, iteration))
    return spans


def start(title: str, titles: list[str], **shape: Any) -> tuple[Any, Any]:
    """A figure of plots below each other."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, plots = plt.subplots(
        len(titles), 1, figsize=(9.5, 3 * len(titles)), sharex=True, layout="constrained", **shape
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    for axes, text in zip(plots, titles, strict=True):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(text, loc="left", fontsize=10.5)
    plots[-1].set_xlabel("iteration")
    return figure, plots


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(runs: Mapping[str, Curves], path: Path) -> None:
    """Left the accepted length over the steps, right what was decoded in the end. Red is cross entropy."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (steps, decoded) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained", width_ratios=(3, 2))
    title = "One frozen main model, MTP heads trained by two losses"
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    for number, ((name, run), colour) in enumerate(zip(runs.items(), (RED, BLUE), strict=True)):
        steps.plot(*zip(*sorted(run.accepted_length.items()), strict=True), color=colour, marker="o", label=name)
        places = [place + 0.38 * (number - 0.5) for place in range(len(run.measured))]
        bars = decoded.bar(places, run.measured.values(), 0.36, color=colour)
        decoded.bar_label(bars, fmt="{:.2f}", padding=2)
        decoded.set_xticks(range(len(run.measured)), run.measured)
    decoded.margins(y=0.12)
    steps.set_xticks(sorted(run.accepted_length))
    steps.set_title("accepted length on held-out text, logged", loc="left", fontsize=10.5)
    steps.set_xlabel("steps of training the heads")
    steps.set_ylabel("tokens per verification step")
    decoded.set_title("decoded after the last step", loc="left", fontsize=10.5)
    for axes in (steps, decoded):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    steps.legend(frameon=False)
    save(figure, path)


def draw_heads(attached: Curves, one_norm: Curves, detached: Curves, clip: float, path: Path) -> None:
    titles = [
        "loss of the main model, mean of 5 iterations",
        "gradient norm by which the main model is clipped",
        "acceptance rate of the first head",
    ]
    figure, (loss, norm, acceptance) = start("Detached heads learn as well and leave the main model alone", titles)
    runs = (
        (attached, RED, "heads train the main model"),
        (one_norm, YELLOW, "detached, one norm for all"),
        (detached, BLUE, "detached, separate norm"),
    )
    for run, colour, label in runs:
        loss.plot(*smooth(without(run.loss, range(STEEP + 1))), color=colour, linewidth=1.8, label=label)
        norm.plot(*smooth(run.grad_norm), color=colour, linewidth=1.5, label=label)
        acceptance.plot(*smooth(run.acceptance[1]), color=colour, linewidth=1.8, label=label)
    dotted = {"linewidth": 1.2, "linestyle": (0, (2, 2))}
    norm.plot(*smooth(detached.mtp_grad_norm), color=BLUE, label="norm of its heads", **dotted)
    norm.axhline(clip, color=DARK, linewidth=1, linestyle=DASHED)
    norm.annotate(f"--clip-grad {clip:g}", (1, clip), xytext=(2, -12), textcoords="offset points", color=DARK)
    loss.set_ylabel("bits per byte")
    norm.set_yscale("log")
    norm.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    norm.minorticks_off()
    acceptance.set_ylabel("percent")
    acceptance.set_xlim(1, max(detached.loss))
    loss.legend(frameon=False)
    norm.legend(frameon=False)
    save(figure, path)


def draw_skipping(
    shared: Curves, before: Curves, after: Curves, corrupt: Collection[int], threshold: float, path: Path
) -> None:
    titles = [f"loss on text, mean of {WINDOW} iterations", "gradient norm before clipping"]
    if shared.mtp_loss:
        titles.insert(1, f"loss of the MTP head on text, mean of {WINDOW} iterations")
    title = "A bad batch sets training back; skipping its update does not"
    figure, (loss, *mtp, norm) = start(title, titles, height_ratios=(3, *[2] * (len(titles) - 1)))
    spans = bursts(corrupt)
    for axes in (loss, *mtp, norm):
        for first, last in spans:
            axes.axvspan(first - 0.5, last + 0.5, color=ACCIDENT, linewidth=0)
    lines = _draw_loss(loss, corrupt, shared.loss, before.loss, after.loss)
    _name_lines(loss, lines, spans)
    for axes in mtp:
        _draw_loss(axes, corrupt, shared.mtp_loss, before.mtp_loss, after.mtp_loss)
    _draw_norm(norm, threshold, shared.grad_norm, before.grad_norm, after.grad_norm)
    norm.set_xlim(max(shared.loss) - EARLIER, max(after.loss) + 1)
    save(figure, path)


def _draw_loss(axes: Axes, corrupt: Collection[int], shared: Curve, before: Curve, after: Curve) -> list[Line]:
    """Both continuations grow out of the shared line. Returns them."""
    iterations, values = smooth(shared)
    axes.plot(iterations, values, color=GREY, linewidth=1.8, zorder=3)
    lines = []
    visible = values[-EARLIER:]
    for curve, colour in ((before, RED), (after, BLUE)):
        iterations, values = smooth({**shared, **without(curve, corrupt)})
        fork = iterations.index(max(shared))
        lines.append((iterations[fork:], values[fork:]))
        axes.plot(*lines[-1], color=colour, linewidth=1.8)
        visible += [value for value in lines[-1][1] if not math.isnan(value)]
    margin = (max(visible) - min(visible)) * 0.12
    axes.set_ylim(min(visible) - margin, max(visible) + margin)
    axes.set_ylabel("bits per byte")
    return lines


def _name_lines(axes: Axes, lines: list[Line], spans: list[tuple[int, int]]) -> None:
    """Name both right after the first burst, where they are furthest apart, and the burst itself."""
    first, last = spans[0]
    before, after = (dict(zip(*line, strict=True)) for line in lines)
    named: dict[str, Any] = {"weight": "bold", "textcoords": "offset points"}
    axes.annotate("no threshold", (last + 4, before[last + 4]), xytext=(12, 8), color=RED, **named)
    below = min(value for iteration, value in after.items() if last < iteration < last + 40)
    axes.annotate("updates skipped", (last + 1, below), xytext=(0, -16), color=BLUE, **named)
    axes.annotate(
        f"{last - first + 1} batches arrive\nstill compressed",
        (first - 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=NOTE,
    )


def _draw_norm(axes: Axes, threshold: float, shared: Curve, before: Curve, after: Curve) -> None:
    for curve, colour in ((shared, GREY), (before, RED), (after, BLUE)):
        axes.plot(*zip(*sorted(curve.items()), strict=True), color=colour, linewidth=1.2)
    skipped = {iteration: value for iteration, value in after.items() if not value <= threshold}
    axes.scatter(list(skipped), list(skipped.values()), s=16, color=BLUE, zorder=3)
    axes.axhline(threshold, color=DARK, linewidth=1, linestyle=DASHED)
    named: dict[str, Any] = {"textcoords": "offset points", "ha": "left"}
    where = (max(shared) - EARLIER, threshold)
    axes.annotate(f"--grad-norm-skip-threshold {threshold:g}", where, xytext=(4, 5), color=DARK, **named)
    if skipped:
        first = bursts(skipped)[0][1]
        label = f"{len(skipped)} updates skipped"
        axes.annotate(label, (first, skipped[first]), xytext=(8, -3), color=BLUE, weight="bold", **named)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("norm")
