"""One training run of the demo under the patches: its flags, its progress, what it wrote for TensorBoard."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from curves import Curves, read_curves
from plain_modules import PLAIN_MODULES
from rich.console import Console
from rich.table import Table

# What a log line must hold to be shown; the whole log is kept in a file.
SHOWN = re.compile(r"^\s*(\[[^]]*\] )?iteration +\d+/|validation loss at|update skipped|^rehearsal on the CPU")

CLIP = 1.0

MODEL = (
    "--num-layers 3 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
)
TRAINING = (
    "--micro-batch-size 16 --global-batch-size 16 --seed 1234 "
    f"--clip-grad {CLIP:g} --lr 2e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 20 "
    "--weight-decay 0.1 --adam-beta2 0.95"
)
DATA = "--split 98,2,0 --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 8 --num-workers 0"
LOGGING = (
    "--log-interval 20 --tensorboard-log-interval 1 --eval-interval 100000 --eval-iters 20 "
    "--save-interval 100000 --ckpt-format torch"
)


def train(name: str, output: Path, data: Path, *flags: str, patches: str = "all") -> Curves:
    """Run train.py under `patches`; show its progress, keep its whole log in `name`.log."""
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
            env={**environment(), "MEGATRON_MTP_PATCHES": patches},
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


def where() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU (no GPU here: rehearsal)"


def present(doc: str, measure: Callable[[Path, Path], Table], picture: str) -> None:
    """A script's main: `measure(data, output)` trains and leaves `picture` in `output`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="dataset, without .bin and .idx")
    parser.add_argument("--output", type=Path, required=True, help="folder for logs, curves and the plot")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    table = measure(flags.data, flags.output)
    print(flush=True)
    Console().print(table)
    print(f"plot: {flags.output / picture}")
