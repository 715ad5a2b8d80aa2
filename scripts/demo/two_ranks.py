"""Does a run compute the right numbers? Ask doctor and parity; train without and with the patches, beside one rank.

    PYTHONPATH=.:.venv/transformer_engine python -m scripts.demo.two_ranks [--output demo_output]

The run is a small GPT with tied embeddings and fused weight gradients, Megatron's default, trained with Adam on the
standard library's sources, on two ranks by Megatron-FSDP. The run on one rank has the same first weights, batches and
flags but those of Megatron-FSDP, so the losses should be the same. All is on the CPU, also where there is a GPU. It
needs TransformerEngine's Python, without which Megatron-FSDP refuses fused weight gradients.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.common.markdown import Table

from . import plots, runs, stages
from .experiments import FLAGS
from .runs import Curves

RANKS = 2
OTHERS = ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights")  # of the other experiments
ONE_RANK = [*(flag for flag in FLAGS if flag not in OTHERS), *"--train-iters 100 --global-batch-size 16".split()]
FSDP = """
    --use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor
""".split()
TWO_RANKS = [*ONE_RANK, *FSDP]
LAST = 20  # iterations of a mean


def main() -> None:
    output, stage = stages.start("scripts.demo.two_ranks", __doc__)
    stage(f"doctor: which known defects affect a GPT on {RANKS} ranks by Megatron-FSDP?")
    ask("doctor", "--world-size", str(RANKS))
    stage("parity: does this run, made small, compute on each cut what it computes on one rank?")
    ask("parity", "--ranks", str(RANKS), "--script", str(runs.TRAIN), MEGATRON_MTP_PATCHES="none")
    stage("the training itself: on one rank; on two, with Megatron as it is; on two, with the patches")
    alone, unpatched, patched = train(output)
    print(flush=True)
    compare(alone, unpatched, patched).show()
    print(f"plot: {output / plots.TWO_RANKS}")


def ask(command: str, *options: str, **variables: str) -> None:
    """Have a command of the package print its answer for the run on two ranks."""
    words = [sys.executable, "-W", "ignore", "-m", "megatron_mtp_patches", command, *options, "--", *TWO_RANKS]
    subprocess.run(words, env={**os.environ, **variables}, check=False)


def train(output: Path) -> tuple[Curves, Curves, Curves]:
    """Train on one rank, on two unpatched, on two patched, one after the other; draw the plot in `output`."""
    runs.warm(RANKS, on_cpu=True)
    from . import dataset

    data = output / "data" / "stdlib"
    dataset.write(data, dataset.library_sources())
    text = ["--data-path", str(data)]
    (alone,) = runs.train(output, {"one_rank": [*ONE_RANK, *text]})
    (unpatched,) = runs.train(output, {"unpatched": [*TWO_RANKS, *text]}, ranks=RANKS, patches="none")
    (patched,) = runs.train(output, {"patched": [*TWO_RANKS, *text]}, ranks=RANKS)
    plots.draw_two_ranks(alone, unpatched, patched, output / plots.TWO_RANKS)
    return alone, unpatched, patched


def compare(alone: Curves, unpatched: Curves, patched: Curves) -> Table:
    """Mean losses at the end, and how far they are from that of one rank."""
    named = {"one rank": alone, "two ranks, Megatron as it is": unpatched, "two ranks, with the patches": patched}
    losses = {name: run.mean_loss(LAST) for name, run in named.items()}
    expected = losses["one rank"]
    rows = [[name, f"{loss:.4f}", f"{abs(loss - expected):.4f}"] for name, loss in losses.items()]
    title = f"loss of the last {LAST} iterations, in bits per byte"
    return Table(title, ["", "loss", "difference from one rank"], rows, right=(1, 2))


if __name__ == "__main__":
    main()
