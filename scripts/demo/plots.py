"""Draw what the experiments show: losses, and the gradient norms that decide."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from scripts.common.pictures import BLUE, DARK, GREY, RED, save, start

from .runs import Curve, Curves

TWO_RANKS, SKIPPING, LOSSES = "two_ranks.png", "skip_large_grad_norm.png", "accepted_length.png"
DASHED = (0, (4, 3))
WINDOW = 5  # iterations of a mean
STEEP = 20  # iterations whose losses would flatten everything else
EARLIER = 60  # iterations shown before the checkpoint: the steep start would flatten everything else


def without(curve: Curve, iterations: Collection[int]) -> Curve:
    return {iteration: value for iteration, value in curve.items() if iteration not in iterations}


def smooth(curve: Curve) -> Curve:
    """A trailing mean that starts again after a gap, so that a jump shows at once and in full."""
    means: Curve = {}
    recent: list[float] = []
    for iteration in sorted(curve):
        if means and iteration - 1 not in curve:
            means[iteration - 1] = math.nan  # which is not drawn
            recent = []
        recent = [*recent[1 - WINDOW :], curve[iteration]]
        means[iteration] = sum(recent) / len(recent)
    return means


def draw(axes: Any, curve: Curve, colour: str, width: float = 1.8, **style: Any) -> None:
    axes.plot(list(curve), list(curve.values()), color=colour, linewidth=width, **style)


def draw_two_ranks(alone: Curves, unpatched: Curves, patched: Curves, path: Path) -> None:
    """Left the losses over the steps, right how far those of two ranks are from that of one. Red is unpatched."""
    titles = [f"loss, mean of {WINDOW} iterations", "difference from one rank"]
    title = "One training: on one rank, on two by Megatron-FSDP"
    figure, (loss, difference) = start(title, titles, 1, (9.5, 4))
    expected = smooth(alone.loss)
    draw(loss, expected, GREY, 5, alpha=0.5, label="one rank")
    for run, colour, label in ((unpatched, RED, "two ranks"), (patched, BLUE, "two ranks, patched")):
        line = smooth(run.loss)
        draw(loss, line, colour, 1.5, label=label)
        draw(difference, {step: line[step] - expected[step] for step in line}, colour)
    visible = list(expected.values())[STEEP:]
    loss.set(ylim=(min(visible) - 0.2, max(visible)), ylabel="bits per byte")
    for axes in (loss, difference):
        axes.set(xlabel="iteration", xlim=(STEEP, max(expected)))
    loss.legend(frameon=False)
    save(figure, path)


def draw_losses(runs: Mapping[str, Curves], path: Path) -> None:
    """Left the accepted length over the steps, right what was decoded in the end. Red is cross entropy."""
    titles = ["accepted length on held-out text, logged", "decoded after the last step"]
    title = "One frozen main model, MTP heads trained by two losses"
    figure, (steps, decoded) = start(title, titles, 1, (9.5, 4), width_ratios=(3, 2))
    for number, ((name, run), colour) in enumerate(zip(runs.items(), (RED, BLUE), strict=True)):
        draw(steps, run.accepted_length, colour, 1.5, marker="o", label=name)
        places = [place + 0.38 * (number - 0.5) for place in range(len(run.measured))]
        decoded.bar_label(decoded.bar(places, run.measured.values(), 0.36, color=colour), fmt="{:.2f}", padding=2)
        decoded.set_xticks(range(len(run.measured)), run.measured)
    decoded.margins(y=0.12)
    steps.set(xticks=list(run.accepted_length), xlabel="steps of training the heads")
    steps.set_ylabel("tokens per verification step")
    steps.legend(frameon=False)
    save(figure, path)


def draw_skipping(
    shared: Curves, before: Curves, after: Curves, bursts: tuple[range, ...], threshold: float, path: Path
) -> None:
    titles = [f"loss on text, mean of {WINDOW} iterations", "gradient norm before clipping"]
    title = "A bad batch sets training back; skipping its update does not"
    figure, (loss, norm) = start(title, titles, 2, (9.5, 6), height_ratios=(3, 2))
    for axes in (loss, norm):
        for burst in bursts:
            axes.axvspan(burst[0] - 0.5, burst[-1] + 0.5, color="#f3e6c8", linewidth=0)
    _draw_loss(loss, bursts, shared.loss, before.loss, after.loss)
    _draw_norm(norm, threshold, shared.grad_norm, before.grad_norm, after.grad_norm)
    norm.set(xlabel="iteration", xlim=(max(shared.loss) - EARLIER, max(after.loss) + 1))
    save(figure, path)


def _draw_loss(axes: Any, bursts: tuple[range, ...], shared: Curve, before: Curve, after: Curve) -> None:
    """Both continuations grow out of the shared line."""
    start = smooth(shared)
    draw(axes, start, GREY, zorder=3)
    visible = list(start.values())[-EARLIER:]
    for curve, colour, label in ((before, RED, "no threshold"), (after, BLUE, "updates skipped")):
        means = smooth({**shared, **without(curve, {iteration for burst in bursts for iteration in burst})})
        line = {iteration: mean for iteration, mean in means.items() if iteration >= max(shared)}
        draw(axes, line, colour, label=label)
        visible += [mean for mean in line.values() if not math.isnan(mean)]
    margin = (max(visible) - min(visible)) * 0.12
    axes.set(ylim=(min(visible) - margin, max(visible) + margin), ylabel="bits per byte")
    axes.legend(frameon=False, title="In the shaded iterations batches arrive still compressed", alignment="left")


def _draw_norm(axes: Any, threshold: float, shared: Curve, before: Curve, after: Curve) -> None:
    for curve, colour in ((shared, GREY), (before, RED), (after, BLUE)):
        draw(axes, curve, colour, 1.2)
    skipped = {iteration: value for iteration, value in after.items() if not value <= threshold}
    axes.scatter(list(skipped), list(skipped.values()), s=16, color=BLUE, zorder=3, label=f"{len(skipped)} skipped")
    label = f"--grad-norm-skip-threshold {threshold:g}"
    axes.axhline(threshold, color=DARK, linewidth=1, linestyle=DASHED, label=label)
    axes.set(yscale="log", ylabel="norm")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
