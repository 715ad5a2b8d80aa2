"""Draw what MTP heads do to their trunk: its loss, the norm that clips it, and what the heads learn all the same."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from curves import Curves
from plot_skipping import smooth

ATTACHED, ONE_NORM, DETACHED, NOTE = "#c8452f", "#c99700", "#1f6fb2", "#444444"
STEEP = 15  # iterations left out of the losses: the steep start would flatten everything else


def draw(attached: Curves, one_norm: Curves, detached: Curves, clip: float, path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (loss, norm, acceptance) = plt.subplots(3, 1, figsize=(9.5, 9), sharex=True, layout="constrained")
    figure.suptitle(
        "Detached heads learn as well and leave the trunk alone", x=0.01, ha="left", fontsize=15, weight="bold"
    )
    runs = (
        (attached, ATTACHED, "heads train the trunk"),
        (one_norm, ONE_NORM, "detached, one norm for all"),
        (detached, DETACHED, "detached, own norm"),
    )
    for axes in (loss, norm, acceptance):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    for run, colour, label in runs:
        late = {iteration: value for iteration, value in run.loss.items() if iteration > STEEP}
        loss.plot(*smooth(late), color=colour, linewidth=1.8, label=label)
        norm.plot(*smooth(run.grad_norm), color=colour, linewidth=1.5, label=label)
        acceptance.plot(*smooth(run.acceptance[1]), color=colour, linewidth=1.8, label=label)
    norm.plot(
        *smooth(detached.mtp_grad_norm),
        color=DETACHED,
        linewidth=1.2,
        linestyle=(0, (2, 2)),
        label="its heads' own norm",
    )
    norm.axhline(clip, color=NOTE, linewidth=1, linestyle=(0, (4, 3)))
    norm.annotate(f"--clip-grad {clip:g}", (1, clip), xytext=(2, -12), textcoords="offset points", color=NOTE)
    loss.set_title("loss of the trunk, mean of 5 iterations", loc="left", fontsize=10.5)
    loss.set_ylabel("bits per byte")
    norm.set_title("gradient norm by which the trunk is clipped", loc="left", fontsize=10.5)
    norm.set_yscale("log")
    norm.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    norm.minorticks_off()
    acceptance.set_title("tokens that the first head guesses right", loc="left", fontsize=10.5)
    acceptance.set_ylabel("percent")
    acceptance.set_xlabel("iteration")
    acceptance.set_xlim(1, max(detached.loss))
    loss.legend(frameon=False)
    norm.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
