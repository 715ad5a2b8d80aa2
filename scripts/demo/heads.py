"""Train a trunk with two MTP heads three ways, and see what the heads do to the trunk.

    python scripts/demo/heads.py --data demo_output/data/stdlib --output demo_output

The heads' loss weighs three times the trunk's. They train the trunk; then they are detached but share one gradient norm
with it, as before NVIDIA/Megatron-LM#4116; then they are detached and clipped by their own norm.
"""

from __future__ import annotations

from pathlib import Path

from curves import Curves, mean
from plot_heads import draw
from rich.table import Table
from runs import CLIP, present, train, where

ITERATIONS = 120
FLAGS = f"--train-iters {ITERATIONS} --mtp-num-layers 2 --mtp-loss-scaling-factor 3".split()
LATE = range(ITERATIONS - 19, ITERATIONS + 1)
PICTURE = "detached_mtp_heads.png"


def share_kept(run: Curves) -> float:
    """What clipping leaves of the trunk's gradient in an average step, in percent."""
    return 100 * mean([min(1.0, CLIP / norm) for norm in run.grad_norm.values()])


def compare(attached: Curves, one_norm: Curves, detached: Curves) -> Table:
    table = Table(title=f"two MTP heads, {ITERATIONS} iterations; losses in bits a byte")
    table.add_column("")
    for title in ("heads train\nthe trunk", "detached,\none norm for all", "detached,\nown norm"):
        table.add_column(title, justify="right")
    runs = (attached, one_norm, detached)

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *cells)

    def late(curve: dict[int, float]) -> float:
        return mean([curve[iteration] for iteration in LATE])

    row("validation loss of the trunk", *(f"{run.validation_loss:.3f}" for run in runs))
    row("gradient norm that clips the trunk", *(f"{late(run.grad_norm):.2f}" for run in runs))
    row("share of its gradient the trunk keeps, %", *(f"{share_kept(run):.0f}" for run in runs))
    row("gradient norm of the heads", "-", "-", f"{late(detached.mtp_grad_norm):.2f}")
    for head in (1, 2):
        row(f"acceptance of head {head}, %", *(f"{late(run.acceptance[head]):.1f}" for run in runs))
    return table


def measure(data: Path, output: Path) -> Table:
    """Train, draw the plot in `output`, and compare."""
    print(f"--- 1 of 3: the heads train the trunk, on {where()}", flush=True)
    attached = train("attached", output, data, *FLAGS)
    print("--- 2 of 3: --mtp-detach-heads, without clip-mtp-grads-separately", flush=True)
    one_norm = train("one_norm", output, data, *FLAGS, "--mtp-detach-heads", patches="-clip-mtp-grads-separately")
    print("--- 3 of 3: --mtp-detach-heads", flush=True)
    detached = train("detached", output, data, *FLAGS, "--mtp-detach-heads")
    draw(attached, one_norm, detached, CLIP, output / PICTURE)
    return compare(attached, one_norm, detached)


if __name__ == "__main__":
    present(__doc__, measure, PICTURE)
