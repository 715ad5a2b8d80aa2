"""Train by Megatron's trainer, in forks of one process that has imported torch and Megatron; read the curves."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from scripts.common.forks import fork, wait
from scripts.common.process import TAIL, free_port, rank_variables

TRAIN = Path(__file__).with_name("train.py")
MOST_THREADS = 4  # the model is small
BITS = 1 / math.log(2)  # from nats to bits
Curve = dict[int, float]
_ITERATION = re.compile(r"\] iteration +(\d+)/ +(\d+) \|(.*)")
_VALIDATION = re.compile(r"validation of the MTP heads at iteration (\d+) \|(.*)")
_COLUMNS = {  # of a log line, and how they are shown
    "lm loss": "lm loss",
    "mtp_1 loss": "mtp_1 loss",
    "grad norm": "grad norm",
    "mtp acceptance length value": "accepted length",
    "mtp greedy acceptance length value": "greedy",
}


@dataclass
class Curves:
    """What one run wrote for TensorBoard, by iteration. Losses are in bits per byte."""

    loss: Curve
    mtp_loss: Curve
    grad_norm: Curve
    accepted_length: Curve  # on validation data
    validation_loss: float | None
    updates_skipped: int
    measured: Any = None

    def mean_loss(self, iterations: int) -> float:
        """The mean of the last iterations."""
        return fmean(list(self.loss.values())[-iterations:])


def warm(ranks: int = 1, *, on_cpu: bool = False) -> str:
    """Import what the runs need, once for all forks; return "cuda", or "cpu" where there is no GPU (a rehearsal).

    A fork cannot use a GPU that this process has initialised, nor OpenMP threads that it has started: it does neither.

    Args:
        ranks: the most that a run has.
        on_cpu: leave a GPU alone.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Where other programs run too, OpenMP threads that spin while they wait make a step ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import megatron_mtp_patches
    import torch

    device = "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"
    if device == "cpu":
        os.environ |= rank_variables(0, ranks, free_port())
        from megatron_mtp_patches import rehearsal

        rehearsal.install()
    megatron_mtp_patches.revert()  # each run applies its own
    import megatron.training  # noqa: F401
    import torch.utils.tensorboard

    from . import trainer  # noqa: F401

    return device


def train(
    output: Path,
    runs: Mapping[str, list[str]],
    measure: Callable[[Any], Any] = lambda model: None,
    ranks: int = 1,
    patches: str = "all",
) -> list[Curves]:
    """Train all at the same time in forks; `warm` must have been called.

    Shows their progress. For a run NAME the flags are left in `output`/NAME.flags, and its whole log in NAME.log.

    Args:
        runs: the flags of each: Megatron's, and those of dataset.py.
        measure: is given a trained model; what it returns becomes `Curves.measured`.
        ranks: of each run.
        patches: what each run applies, as MEGATRON_MTP_PATCHES has it.
    """
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (len(runs) * ranks)))
    logs = {name: output / f"{name}.log" for name in runs}
    started = time.perf_counter()
    with os.fdopen(os.dup(1), "w", buffering=1) as terminal:
        pids = {}
        for name, flags in runs.items():
            logs[name].unlink(missing_ok=True)
            words, port = _start_anew(output, name, flags), free_port()
            for rank in range(ranks):
                variables = rank_variables(rank, ranks, port)
                action = partial(_train, output, name, words, measure, threads, terminal, variables, patches)
                pids[fork(action, logs[name])] = name
        codes = wait(pids, math.inf)
    for pid, name in pids.items():
        if codes[pid] not in (0, None):
            tail = "\n".join(logs[name].read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
            sys.exit(f"{tail}\n'{name}' failed (exit code {codes[pid]}); the whole log is {logs[name]}")
    print(f"    {time.perf_counter() - started:.0f} s; logs: {', '.join(map(str, logs.values()))}")
    return [read_curves(output, name) for name in runs]


def _start_anew(output: Path, name: str, flags: list[str]) -> list[str]:
    """Remove what an earlier run NAME has left, and write its flags; return them with the folders of this one."""
    curves = output / "tensorboard" / name
    # Two runs at the same time must not write one index of the dataset: Megatron reads it while it is half written.
    index = output / "dataset_index" / name
    for old in (curves, index):
        shutil.rmtree(old, ignore_errors=True)
    (output / f"{name}.json").unlink(missing_ok=True)
    words = [*flags, "--tensorboard-dir", str(curves), "--data-cache-path", str(index)]
    (output / f"{name}.flags").write_text(" ".join(words) + "\n", encoding="utf-8")
    return words


def _train(
    output: Path,
    name: str,
    flags: list[str],
    measure: Callable[[Any], Any],
    threads: int,
    terminal: TextIO,
    variables: Mapping[str, str],
    patches: str,
) -> None:
    """Be a rank of a run, in a fork."""
    import megatron_mtp_patches
    import torch

    from . import trainer

    # Megatron-FSDP refuses the one connection that other runs ask for.
    connections = "8" if "--use-megatron-fsdp" in flags else "1"
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": connections, **variables}
    torch.set_num_threads(threads)
    megatron_mtp_patches.apply(patches)
    sys.argv = [str(TRAIN), *flags]
    sys.stdout = _Progress(name, sys.stdout, terminal)
    model = trainer.train()  # which --exit-interval ends with the process
    if variables["RANK"] == "0":
        (output / f"{name}.json").write_text(json.dumps(measure(model)), encoding="utf-8")


class _Progress(io.TextIOBase):
    """Writes to a log, and to the terminal of each line what changes."""

    def __init__(self, name: str, log: TextIO, terminal: TextIO) -> None:
        self.name, self.log, self.terminal = name, log, terminal

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if shown := shorten(line):
                self.terminal.write(f"    {self.name:14}{shown}\n")
        return self.log.write(text)


def shorten(line: str) -> str | None:
    """Return what a demo shows of a log line in 60 columns; None: nothing."""
    if match := _ITERATION.search(line):
        start, columns = f"{match[1]:>4}/{match[2]}", match[3]
    elif match := _VALIDATION.search(line):
        start, columns = "    on held-out text", match[2]
    else:
        return None
    cells = (cell.rpartition(":") for cell in columns.split("|"))
    shown = [f"{_COLUMNS[name.strip()]} {float(value):.2f}" for name, _, value in cells if name.strip() in _COLUMNS]
    return "  ".join([start, *shown])


def read_curves(output: Path, name: str) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(output / "tensorboard" / name), size_guidance={"scalars": 0}).Reload()
    measured = output / f"{name}.json"

    def scalar(tag: str, unit: float = 1.0) -> Curve:
        if tag not in events.Tags()["scalars"]:
            return {}
        return {event.step: event.value * unit for event in events.Scalars(tag)}

    return Curves(
        loss=scalar("lm loss", BITS),
        mtp_loss=scalar("mtp_1 loss", BITS),
        grad_norm=scalar("grad-norm"),
        accepted_length=scalar("mtp_acceptance_length validation"),
        validation_loss=next(reversed(scalar("lm loss validation", BITS).values()), None),
        updates_skipped=int(max(scalar("updates-skipped-for-grad-norm").values(), default=0)),
        measured=json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else None,
    )
