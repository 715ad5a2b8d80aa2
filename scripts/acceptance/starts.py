"""Train MTP heads from both values of --mtp-init over one frozen main model, and compare the accepted lengths.

    python -m scripts.acceptance.starts [--out ci/starts] [--figure docs/mtp_starts.png]

The main model, the text and the steps are those of `python -m scripts.acceptance`, the loss is e2e_tv (CPU, one
process, 10 minutes). Needs torch, megatron-core and matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts import study
from scripts.acceptance import training
from scripts.acceptance.table import starts_columns, starts_numbers
from scripts.common.arguments import make_parser
from scripts.common.markdown import Table
from scripts.common.process import ROOT

STARTS = ("random", "last-layer")
LOSS_TYPE, LENGTH = "e2e_tv", "mtp acceptance length"


def main() -> int:
    parser = make_parser("scripts.acceptance.starts", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "starts", help="folder of the table")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "mtp_starts.png")
    options = parser.parse_args()
    console = Console()
    curves = {}
    with training.trained_main_model(console) as trained:
        for start in STARTS:
            console.print(f"training the heads: {start}")
            _, curve = training.train_heads(*trained, LOSS_TYPE, start)
            curves[start] = [(step, metrics[LENGTH]) for step, metrics in curve]
    study.keep(options.out, make_table(curves), curves)
    draw(curves, options.figure)
    return 0


def make_table(curves: dict[str, Any]) -> Table:
    """The rows of table.py, and how they were made."""
    note = (
        f"The accepted length ({LENGTH}) of {training.DEPTHS} heads on held-out text, over the steps of training them "
        f"by {LOSS_TYPE}. Made by `python -m scripts.acceptance.starts` with {study.made_with()} on a CPU."
    )
    columns = starts_columns(curves)
    return Table("Starts of MTP heads", columns, starts_numbers(curves), range(1, len(columns)), note=note)


def draw(curves: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for (start, curve), color in zip(curves.items(), ("#8a8a8a", "#c8452f"), strict=True):
        axis.plot(*zip(*curve, strict=True), color=color, marker="o", markersize=3, label=f"--mtp-init {start}")
    axis.set_xlabel("steps of training the heads")
    axis.set_ylabel("tokens per verification step")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
