"""Train once to a checkpoint, go on from it without and with --grad-norm-skip-threshold, and compare.

    python scripts/demo/skipping.py --data demo_output/data/stdlib --output demo_output

Both continuations meet the same accident: bursts of batches that arrive still compressed (`task.py`).
Everything else is the same command line, seed and data order.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from curves import Curves, mean, without
from plot_skipping import draw
from rich.table import Table
from runs import present, train, where

FORK, LAST = 280, 460  # iterations: the checkpoint, and the end of both continuations
BURSTS = (range(300, 308), range(360, 368), range(420, 428))
CORRUPT = frozenset(iteration for burst in BURSTS for iteration in burst)
THRESHOLD = 10.0  # gradient norms: about 1 on text (9 in the very first steps), above 20 on compressed bytes

HEADS = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3".split()
PICTURE = "skip_large_grad_norm.png"


def compare(before: Curves, after: Curves) -> Table:
    table = Table(title=f"iterations {FORK + 1} to {LAST}, losses in bits a byte")
    table.add_column("")
    table.add_column("before\nno threshold", justify="right")
    table.add_column(f"after\nskip over {THRESHOLD:g}", justify="right")

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    runs = (before, after)
    text = [without(run.loss, CORRUPT) for run in runs]
    heads = [without(run.mtp_loss, CORRUPT) for run in runs]
    row("validation loss at the end", *(f"{run.validation_loss:.3f}" for run in runs))
    row("training loss on text, mean", *(f"{mean(list(loss.values())):.3f}" for loss in text))
    row("training loss on text, worst", *(f"{max(loss.values()):.3f}" for loss in text))
    row("MTP loss on text, mean", *(f"{mean(list(loss.values())):.3f}" for loss in heads))
    row("largest gradient norm", *(f"{max(run.grad_norm.values()):.1f}" for run in runs))
    calm = [max(without(run.grad_norm, CORRUPT).values()) for run in runs]
    row("largest gradient norm on text", *(f"{norm:.1f}" for norm in calm))
    row("updates skipped", *(str(run.updates_skipped) for run in runs))
    return table


def measure(data: Path, output: Path) -> Table:
    """Train, draw the plot in `output`, and compare."""
    checkpoint = output / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)

    common = [*HEADS, "--train-iters", str(LAST)]
    print(f"--- 1 of 3: train to iteration {FORK} on {where()}, save a checkpoint", flush=True)
    shared = train("shared", output, data, *common, "--save", str(checkpoint), "--exit-interval", str(FORK))
    accident = [*common, "--load", str(checkpoint), "--corrupt-iterations", *map(str, sorted(CORRUPT))]
    print(f"--- 2 of 3: before. Go on to {LAST}; {len(BURSTS)} bursts of compressed batches", flush=True)
    before = train("before", output, data, *accident)
    print("--- 3 of 3: after. The same with --grad-norm-skip-threshold", THRESHOLD, flush=True)
    after = train("after", output, data, *accident, "--grad-norm-skip-threshold", str(THRESHOLD))
    draw(shared, before, after, CORRUPT, THRESHOLD, output / PICTURE)
    return compare(before, after)


if __name__ == "__main__":
    present(__doc__, measure, PICTURE)
