"""Upstream's pretrain_gpt.py without the patches, with them, and with their flags: time, memory, tokens, losses.

    ci/gpu/training.py FILE --checkout DIR [--native DIR] --device cpu|gpu

Each run is a process of its own; they take turns. FILE is written after each, so it is there if time runs out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts/demo"), str(ROOT / "scripts/bench")]

# Of 0.8 B parameters; attention that is not fused holds its matrices, hence one sequence at a time.
SIZES = {
    "gpu": "--num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 4096 --vocab-size 32767 "
    "--max-position-embeddings 4096 --micro-batch-size {micro} --global-batch-size {batch} --train-iters 20",
    "cpu": "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 127 "
    "--max-position-embeddings 32 --micro-batch-size {micro} --global-batch-size {batch} --train-iters 6",
}
BATCH = {True: (4, 8), False: (1, 2)}  # (micro, global), with TransformerEngine's attention and without
WARM_UP = {"gpu": 5, "cpu": 2}
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
LINE = re.compile(r"iteration +\d+/.*?elapsed time per iteration \(ms\): (\S+) \|.*?lm loss: (\S+) \|")
MEMORY = re.compile(r"max allocated: ([\d.]+)")
PARAMETERS = re.compile(r"number of parameters on .*?: (\d+)")


class Variant(NamedTuple):
    name: str
    checkout: Path
    patches: str
    flags: str = ""


def variants(checkout: Path, native: Path | None) -> list[Variant]:
    found = [
        Variant("unpatched", checkout, "none"),
        Variant("patched", checkout, "all"),
        Variant("patched, all flags", checkout, "all", FLAGS),
    ]
    if native:
        found += [Variant("native", native, "none"), Variant("native, its flags", native, "none", NATIVE_FLAGS)]
    return found


def train(variant: Variant, device: str, fused: bool, log: Path) -> dict[str, Any]:
    """What one run printed."""
    from plain_modules import PLAIN_MODULES
    from workers import environment

    micro, batch = BATCH[fused]
    words = f"{SIZES[device].format(micro=micro, batch=batch)} {COMMON} {variant.flags}"
    words += "" if fused else f" {PLAIN_MODULES}"
    command = [sys.executable, "-m", "megatron_mtp_patches", "run", "--device", "cuda" if device == "gpu" else "cpu"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Megatron's Makefile asks for its python3
    surroundings = {**environment(variant.patches), **alone, "PATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with log.open("w") as output:
        done = subprocess.run(
            [*command, str(variant.checkout / "pretrain_gpt.py"), *words.split()],
            env=surroundings, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    if done.returncode:
        sys.exit(f"{text[-3000:]}\n{variant.name} failed, see above")
    lines = LINE.findall(text)
    peak, parameters = MEMORY.search(text), PARAMETERS.search(text)
    return {
        "ms": [float(ms) for ms, _ in lines][WARM_UP[device] :],
        "losses": [float(loss) for _, loss in lines],
        "peak MB": float(peak[1]) if peak and device == "gpu" else None,
        "parameters": int(parameters[1]) if parameters else None,
        "tokens": batch * int(re.search(r"--seq-length (\d+)", words)[1]),  # type: ignore[index]
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    ms = median(one for run in runs for one in run["ms"])
    first = runs[0]
    return {
        "ms": ms,
        "tokens/s": 1e3 * first["tokens"] / ms,
        "peak MB": max((run["peak MB"] for run in runs if run["peak MB"] is not None), default=None),
        "parameters": first["parameters"],
        "losses": first["losses"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--native", type=Path, help="a checkout of 0.19, unpatched")
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    options = parser.parse_args()
    fused = options.device == "gpu" and importlib.util.find_spec("transformer_engine") is not None
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(ROUNDS[options.device]):
        for variant in variants(options.checkout, options.native):
            log = options.file.with_name(f"{variant.name.replace(', ', ' ')} {number + 1}.log")
            print(variant.name, number + 1, flush=True)
            runs.setdefault(variant.name, []).append(train(variant, options.device, fused, log))
            found = {name: summary(each) for name, each in runs.items()}
            modules = "TransformerEngine" if fused else "Megatron's own"
            options.file.write_text(json.dumps({"modules": modules, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
