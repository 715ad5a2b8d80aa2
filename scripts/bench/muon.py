"""Show how clipping stalls Muon where one module has very large gradients (NVIDIA/Megatron-LM#5394).

    python -m scripts.bench muon [--output DIR] [--device cpu|gpu] [--dtype bfloat16]

A small network learns from another one with --clip-grad 1. In each step the gradient of one of its layers, of little
use to the loss, is made RATIO times as large as that of all the others together. Prints the losses as a table and draws
them: over the steps for one ratio, and in the end for all. A bfloat16 network has float32 main parameters, as with
Megatron's --bf16. Needs megatron-core, emerging-optimizers and matplotlib, and a minute on one CPU core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.arguments import positive
from scripts.common.markdown import Table

if TYPE_CHECKING:
    from .muon_training import Losses

STEPS = 200
PICTURE = "muon_stall.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder of the picture")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: the GPU, if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=positive, default=STEPS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses there, too")


def run(options: argparse.Namespace) -> None:
    import torch

    from .muon_training import RATIOS, VARIANTS, measure

    on_gpu = options.device == "gpu" if options.device else torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_available():
        options.error("--device gpu: torch finds no GPU here; --device cpu rehearses without one")
    losses = measure(options.steps, options.dtype, on_gpu)
    compare(losses, options.steps).show()
    if options.json:
        ends = {v.label: {f"{ratio:g}": losses[v, ratio][-1] for ratio in RATIOS} for v in VARIANTS}
        options.json.write_text(json.dumps({"steps": options.steps, "dtype": options.dtype, "losses": ends}, indent=1))
    options.output.mkdir(parents=True, exist_ok=True)
    draw(losses, options.steps, options.output / PICTURE)


def compare(losses: Losses, steps: int) -> Table:
    from .muon_training import RATIOS, VARIANTS

    columns = [f"loss after {steps} steps, in parts of the first", *(f"{ratio:g}" for ratio in RATIOS)]
    rows = [[variant.label, *(f"{losses[variant, ratio][-1]:.4f}" for ratio in RATIOS)] for variant in VARIANTS]
    return Table("one module's gradient, in parts of all others'", columns, rows)


def draw(losses: Losses, steps: int, file: Path) -> None:
    from scripts.common.pictures import save, start

    from .muon_training import RATIO, RATIOS, VARIANTS

    titles = [f"--clip-grad 1, one gradient {RATIO:g} times as large as all others", "after the last step"]
    figure, (left, right) = start("", titles, 1, (10.5, 4.0))
    for variant in VARIANTS:
        style = {"color": variant.colour, "linestyle": "-" if variant.optimizer == "muon" else "--"}
        left.plot(losses[variant, RATIO], label=variant.label, **style)
        right.plot(RATIOS, [losses[variant, ratio][-1] for ratio in RATIOS], marker="o", markersize=3, **style)
    limits = {"yscale": "log", "ylim": (1e-5, 2.0)}
    left.set(xlabel="step", ylabel="loss / loss at the start", **limits)
    right.set(xlabel="how many times as large", ylabel=f"loss after {steps} steps / at the start", **limits)
    right.set_xscale("log")
    right.axvline(RATIO, color="0.8", zorder=0)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, file)
