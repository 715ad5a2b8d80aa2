"""Train with upstream's pretrain_gpt.py: time of a step, memory and losses, unpatched, patched and with all flags.

0.19 stands beside them, with and without its flags. The runs take turns; each is a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from scripts import study
from scripts.common.markdown import Table
from scripts.common.megatron_flags import PLAIN_MODULES
from scripts.common.process import environment, run_or_exit

# 0.8 B parameters on a GPU. Attention that is not fused holds its matrices, hence one sequence at a time without it.
SIZES = {
    "gpu": "--num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 4096 --vocab-size 32767 "
    "--max-position-embeddings 4096 --train-iters 20",
    "cpu": "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 127 "
    "--max-position-embeddings 32 --train-iters 6",
}
WARM_UP = {"gpu": 5, "cpu": 2}  # steps
ROUNDS = {"gpu": 2, "cpu": 1}
COMMON = (
    "--bf16 --use-distributed-optimizer --mtp-num-layers 1 --untie-embeddings-and-output-weights --seed 1234 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 100000 --eval-iters 1 "
    "--mock-data --split 99,1,0 --tokenizer-type NullTokenizer"
)
NATIVE_FLAGS = "--mtp-detach-heads"
FLAGS = (
    f"{NATIVE_FLAGS} --grad-norm-skip-threshold 1000 --mtp-clip-grad 0.5 --mtp-grad-norm-skip-threshold 1000 "
    "--min-clip-coefficient 1e-4"
)
FUSED = "--micro-batch-size 4 --global-batch-size 8"
UNFUSED = f"--micro-batch-size 1 --global-batch-size 2 {PLAIN_MODULES}"
LINE = re.compile(r"iteration +\d+/.*?elapsed time per iteration \(ms\): (\S+) \|.*?lm loss: (\S+) \|")
MEMORY = re.compile(r"max allocated: ([\d.]+)")
LIMIT = 1.01  # of the time of a step, patched / unpatched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkout", type=Path, required=True, help="of the release in this Python")
    parser.add_argument("--native", type=Path, help="a checkout of 0.19")
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="written after each run; logs are put beside it")


def run(options: argparse.Namespace) -> None:
    variants = {
        "unpatched": (options.checkout, "none", ""),
        "patched": (options.checkout, "all", ""),
        "patched, all flags": (options.checkout, "all", FLAGS),
    }
    if options.native:
        variants["native"] = (options.native, "none", "")
        variants["native, its flags"] = (options.native, "none", NATIVE_FLAGS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number in range(1, ROUNDS[options.device] + 1):
        for name, variant in variants.items():
            print(name, number, flush=True)
            log = options.json.with_name(f"{options.json.stem} {name} {number}.log")
            runs[name].append(train(*variant, options.device, log))
            summaries = {name: summarize(past, options.device) for name, past in runs.items() if past}
            options.json.write_text(json.dumps(summaries, indent=1))
    make_table(summaries).show()


def train(checkout: Path, patches: str, more: str, device: str, log: Path) -> dict[str, Any]:
    """What one run printed: time (ms) and loss of each step, and the most that the allocator gave out (MB)."""
    batch = FUSED if device == "gpu" and find_spec("transformer_engine") else UNFUSED
    flags = f"{SIZES[device]} {batch} {COMMON} {more}".split()
    words = ["-m", "megatron_mtp_patches", "run", "--device", "cuda" if device == "gpu" else "cpu"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Megatron's Makefile asks for its python3
    variables = environment(patches, PATH=path, CUDA_DEVICE_MAX_CONNECTIONS="1")
    log.unlink(missing_ok=True)
    script = str(checkout / "pretrain_gpt.py")
    text = run_or_exit([*study.launcher(sys.executable, 1), *words, script, *flags], variables, log=log)
    steps, peak = LINE.findall(text), MEMORY.search(text)
    return {
        "flags": " ".join(flags),
        "ms": [float(ms) for ms, _ in steps],
        "losses": [float(loss) for _, loss in steps],
        "peak MB": float(peak[1]) if peak and device == "gpu" else None,
    }


def summarize(runs: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The median time of a step over all runs of a variant; what else the first of them has."""
    return {**runs[0], "ms": median(ms for run in runs for ms in run["ms"][WARM_UP[device] :])}


def make_table(summaries: dict[str, dict[str, Any]]) -> Table:
    rows, bad = [], []
    for name, run in summaries.items():
        base = summaries["native" if name.startswith("native") else "unpatched"]
        ratios = [run[what] / base[what] if run[what] else None for what in ("ms", "peak MB")]
        cells = ("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        bad += [len(rows)] if name.startswith("patched") and ratios[0] > LIMIT else []
        rows.append([name, f"{run['ms']:.1f}", *cells, f"{run['losses'][-1]:.4f}"])
    columns = ["run", "ms of a step", "/ the first of its kind", "peak memory / the first of its kind", "last loss"]
    note = f"A patched step may take {LIMIT} of an unpatched one; those that took more: {len(bad)}."
    return Table("pretrain_gpt.py, bf16", columns, rows, range(1, 5), bad, note)
