"""Train a small GPT three times, print what that shows as a table, and draw it. Needs what scripts/demo.sh installs.

    python -m scripts.demo.experiments heads|skipping --data demo_output/data/stdlib --output demo_output

heads: how two MTP heads, whose loss weighs three times the main model's, affect the main model. First they train it;
then they are detached but share one gradient norm with it, as before NVIDIA/Megatron-LM#4116; then they are detached
and clipped by a separate norm.

skipping: one training to a checkpoint, which continues from there without and with --grad-norm-skip-threshold. Both
continuations meet the same accident: bursts of batches that arrive still compressed (dataset.py). Command line, seed
and order of the data are otherwise the same.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from scripts.common.arguments import make_parser
from scripts.common.markdown import Table
from scripts.common.megatron_flags import PLAIN_MODULES
from scripts.common.process import environment, run

from . import plots
from .curves import Curves, read_curves

CLIP = 1.0
FLAGS = f"""
    {PLAIN_MODULES}
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 16 --global-batch-size 16 --seed 1234 --clip-grad {CLIP:g} --lr 2e-3 --min-lr 5e-4
    --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
    --split 98,2,0 --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 8 --num-workers 0
    --log-interval 20 --tensorboard-log-interval 1 --eval-interval 100000 --eval-iters 20 --save-interval 100000
    --ckpt-format torch
""".split()
# What a log line must hold to be shown; the whole log is kept in a file.
SHOWN = re.compile(r"^\s*(\[[^]]*\] )?iteration +\d+/|validation loss at|update skipped|^rehearsal on the CPU")

HEADS_LAST = 120  # iterations
LATE = range(HEADS_LAST - 19, HEADS_LAST + 1)
FORK, SKIPPING_LAST = 280, 460  # iterations: the checkpoint, and the end of both continuations
BURSTS = (range(300, 308), range(360, 368), range(420, 428))
CORRUPT = frozenset(iteration for burst in BURSTS for iteration in burst)
THRESHOLD = 10.0  # gradient norms: about 1 on text (9 in the very first steps), above 20 on compressed bytes


def train(name: str, output: Path, data: Path, *flags: object, patches: str = "all") -> Curves:
    """Run train.py under `patches`; show its progress, keep its whole log in `name`.log."""
    tensorboard, log = output / "tensorboard" / name, output / f"{name}.log"
    shutil.rmtree(tensorboard, ignore_errors=True)
    log.unlink(missing_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = ["-m", "megatron_mtp_patches", "run", "--device", device, str(Path(__file__).with_name("train.py"))]
    given = ["--data-path", str(data), "--tensorboard-dir", str(tensorboard), *map(str, flags)]
    started = time.perf_counter()
    # Where other programs run too, OpenMP threads that spin while they wait make a step ten times slower.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **environment(patches, one_thread=False, PYTHONUNBUFFERED="1")}
    result = run([sys.executable, *program, *FLAGS, *given], variables, log, on_line=show)
    if result.code != 0:
        sys.exit(f"{result.tail}\n'{name}' failed (exit code {result.code}); the whole log is {log}")
    print(f"    {time.perf_counter() - started:.0f} s; whole log: {log}", flush=True)
    return read_curves(tensorboard)


def show(line: str) -> None:
    """Print a log line without the columns that stay the same here; of other lines nothing."""
    if SHOWN.search(line):
        line = re.sub(r"^\[[^]]*\] |^WARNING:[\w.]+:", "", line.strip())
        dull = ("consumed samples", "global batch size", "loss scale", "number of nan")
        columns = [column for column in line.split("|") if not column.strip().startswith(dull)]
        print("   ", "|".join(columns), flush=True)


def heads(data: Path, output: Path) -> Table:
    """Train, draw the plot in `output`, and compare."""
    flags = f"--train-iters {HEADS_LAST} --mtp-num-layers 2 --mtp-loss-scaling-factor 3".split()
    print(f"--- 1 of 3: the heads train the main model, on {where()}", flush=True)
    attached = train("attached", output, data, *flags)
    print("--- 2 of 3: --mtp-detach-heads, without clip-mtp-grads-separately", flush=True)
    one_norm = train("one_norm", output, data, *flags, "--mtp-detach-heads", patches="-clip-mtp-grads-separately")
    print("--- 3 of 3: --mtp-detach-heads", flush=True)
    detached = train("detached", output, data, *flags, "--mtp-detach-heads")
    plots.draw_heads(attached, one_norm, detached, CLIP, output / plots.HEADS)
    return compare_heads(attached, one_norm, detached)


def compare_heads(*runs: Curves) -> Table:
    def late(curve: dict[int, float]) -> float:
        return mean(curve[iteration] for iteration in LATE)

    columns = ["", "heads train\nthe main model", "detached,\none norm for all", "detached,\nseparate norm"]
    kept = [100 * mean(min(1.0, CLIP / norm) for norm in run.grad_norm.values()) for run in runs]
    rows = [
        ["validation loss of the main model", *(f"{run.validation_loss:.3f}" for run in runs)],
        ["gradient norm that clips the main model", *(f"{late(run.grad_norm):.2f}" for run in runs)],
        ["share of its gradient the main model keeps, %", *(f"{share:.0f}" for share in kept)],
        ["gradient norm of the heads", "-", "-", f"{late(runs[-1].mtp_grad_norm):.2f}"],
        *([f"acceptance of head {head}, %", *(f"{late(run.acceptance[head]):.1f}" for run in runs)] for head in (1, 2)),
    ]
    title = f"two MTP heads, {HEADS_LAST} iterations; losses in bits per byte"
    return Table(title, columns, rows, right=(1, 2, 3))


def skipping(data: Path, output: Path) -> Table:
    """Train, draw the plot in `output`, and compare."""
    checkpoint = output / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    flags = ["--train-iters", SKIPPING_LAST, *"--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3".split()]
    print(f"--- 1 of 3: train to iteration {FORK} on {where()}, save a checkpoint", flush=True)
    shared = train("shared", output, data, *flags, "--save", checkpoint, "--exit-interval", FORK)
    accident = [*flags, "--load", checkpoint, "--corrupt-iterations", *sorted(CORRUPT)]
    print(f"--- 2 of 3: before. Go on to {SKIPPING_LAST}; {len(BURSTS)} bursts of compressed batches", flush=True)
    before = train("before", output, data, *accident)
    print("--- 3 of 3: after. The same with --grad-norm-skip-threshold", THRESHOLD, flush=True)
    after = train("after", output, data, *accident, "--grad-norm-skip-threshold", THRESHOLD)
    plots.draw_skipping(shared, before, after, CORRUPT, THRESHOLD, output / plots.SKIPPING)
    return compare_skipping(before, after)


def compare_skipping(*runs: Curves) -> Table:
    text = [list(plots.without(run.loss, CORRUPT).values()) for run in runs]
    heads = [list(plots.without(run.mtp_loss, CORRUPT).values()) for run in runs]
    calm = [max(plots.without(run.grad_norm, CORRUPT).values()) for run in runs]
    rows = [
        ["validation loss at the end", *(f"{run.validation_loss:.3f}" for run in runs)],
        ["training loss on text, mean", *(f"{mean(losses):.3f}" for losses in text)],
        ["training loss on text, worst", *(f"{max(losses):.3f}" for losses in text)],
        ["MTP loss on text, mean", *(f"{mean(losses):.3f}" for losses in heads)],
        ["largest gradient norm", *(f"{max(run.grad_norm.values()):.1f}" for run in runs)],
        ["largest gradient norm on text", *(f"{norm:.1f}" for norm in calm)],
        ["updates skipped", *(str(run.updates_skipped) for run in runs)],
    ]
    title = f"iterations {FORK + 1} to {SKIPPING_LAST}, losses in bits per byte"
    return Table(title, ["", "before\nno threshold", f"after\nskip over {THRESHOLD:g}"], rows, right=(1, 2))


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def where() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU (no GPU here: rehearsal)"


def main() -> None:
    experiments = {"heads": (heads, plots.HEADS), "skipping": (skipping, plots.SKIPPING)}
    parser = make_parser("scripts.demo.experiments", __doc__)
    parser.add_argument("experiment", choices=experiments)
    parser.add_argument("--data", type=Path, required=True, help="dataset, without .bin and .idx")
    parser.add_argument("--output", type=Path, required=True, help="folder for logs, curves and the plot")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    experiment, picture = experiments[options.experiment]
    table = experiment(options.data, options.output)
    print(flush=True)
    table.show()
    print(f"plot: {options.output / picture}")


if __name__ == "__main__":
    main()
