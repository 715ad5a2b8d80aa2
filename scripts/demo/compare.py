"""Train once to a checkpoint, go on from it without and with --grad-norm-skip-threshold, and compare.

    python scripts/demo/compare.py --data demo_output/data/stdlib --output demo_output

Both continuations meet the same accident: bursts of batches that arrive still compressed (`task.py`).
Everything else is the same command line, seed and data order.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import torch
from curves import Curves, read_curves, without
from plot import draw
from rich.console import Console
from rich.table import Table

FORK, LAST = 280, 460  # iterations: the checkpoint, and the end of both continuations
BURSTS = (range(300, 308), range(360, 368), range(420, 428))
CORRUPT = frozenset(iteration for burst in BURSTS for iteration in burst)
THRESHOLD = 10.0  # gradient norms: about 1 on text (9 in the very first steps), above 20 on compressed bytes

# What a log line must hold to be shown; the whole log is kept in a file.
SHOWN = re.compile(r"^\s*(\[[^]]*\] )?iteration +\d+/|validation loss at|update skipped|^rehearsal on the CPU")

# Without TransformerEngine and Apex, Megatron's own modules do everything.
PLAIN_MODULES = (
    "--transformer-impl local --attention-backend unfused --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
MODEL = (
    "--num-layers 3 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
)
TRAINING = (
    f"--micro-batch-size 16 --global-batch-size 16 --train-iters {LAST} --seed 1234 "
    "--clip-grad 1 --lr 2e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 20 "
    "--weight-decay 0.1 --adam-beta2 0.95"
)
DATA = "--split 98,2,0 --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 8 --num-workers 0"
LOGGING = (
    "--log-interval 20 --tensorboard-log-interval 1 --eval-interval 100000 --eval-iters 20 "
    "--save-interval 100000 --ckpt-format torch"
)


def train(name: str, output: Path, data: Path, *flags: str) -> Curves:
    """Run train.py under the patches; show its progress, keep its whole log in `name`.log."""
    tensorboard, log = output / "tensorboard" / name, output / f"{name}.log"
    shutil.rmtree(tensorboard, ignore_errors=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    script = str(Path(__file__).with_name("train.py"))
    command = [sys.executable, "-m", "megatron_mtp_patches", "run", "--device", device, script]
    for group in (PLAIN_MODULES, MODEL, TRAINING, DATA, LOGGING):
        command += group.split()
    command += ["--data-path", str(data), "--tensorboard-dir", str(tensorboard), *flags]
    started = time.perf_counter()
    tail: deque[str] = deque(maxlen=25)
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(),
        ) as process,
        log.open("w") as file,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            tail.append(line)
            if SHOWN.search(line):
                print("   ", shorten(line.strip()), flush=True)
    if process.returncode:
        sys.exit(f"{''.join(tail)}\n'{name}' failed (exit code {process.returncode}); the whole log is {log}")
    print(f"    {time.perf_counter() - started:.0f} s; whole log: {log}", flush=True)
    return read_curves(tensorboard)


def environment() -> dict[str, str]:
    # Where other programs run too, OpenMP threads that spin while they wait make a step ten times slower.
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONUNBUFFERED": "1"}


def shorten(line: str) -> str:
    """Drop the columns of Megatron's log line that stay the same here."""
    line = re.sub(r"^\[[^]]*\] |^WARNING:[\w.]+:", "", line)
    dull = ("consumed samples", "global batch size", "loss scale", "number of nan")
    return "|".join(column for column in line.split("|") if not column.strip().startswith(dull))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(before: Curves, after: Curves) -> Table:
    table = Table(title=f"iterations {FORK + 1} to {LAST}, {len(CORRUPT)} of them on compressed bytes")
    table.add_column("losses in bits a byte")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="dataset, without .bin and .idx")
    parser.add_argument("--output", type=Path, required=True, help="folder for logs, curves and the plot")
    arguments = parser.parse_args()
    output, data = arguments.output, arguments.data
    checkpoint = output / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU (no GPU here: rehearsal)"
    print(f"--- 1 of 3: train to iteration {FORK} on {where}, save a checkpoint", flush=True)
    shared = train("shared", output, data, "--save", str(checkpoint), "--exit-interval", str(FORK))
    accident = ["--load", str(checkpoint), "--corrupt-iterations", *map(str, sorted(CORRUPT))]
    print(f"--- 2 of 3: before. Go on to {LAST}; {len(BURSTS)} bursts of compressed batches", flush=True)
    before = train("before", output, data, *accident)
    print("--- 3 of 3: after. The same with --grad-norm-skip-threshold", THRESHOLD, flush=True)
    after = train("after", output, data, *accident, "--grad-norm-skip-threshold", str(THRESHOLD))

    print(flush=True)
    subprocess.run([sys.executable, "-m", "megatron_mtp_patches", "status"], check=False)
    Console().print(compare(before, after))
    picture = output / "skip_large_grad_norm.png"
    draw(shared, before, after, CORRUPT, THRESHOLD, picture)
    print(f"plot: {picture}")


if __name__ == "__main__":
    main()
