"""A training with the watch on, as its ranks run it, and what the log says of it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from megatron_mtp_patches.parity.flags import join
from megatron_mtp_patches.parity.processes import Failed, run_with
from megatron_mtp_patches.parity.training import Job, Record, train

from scripts.common.small_runs import make_small_run

from .outcomes import Found, read_findings
from .plant import Planter

STEPS = 4


class Watched(NamedTuple):
    """What a rank has logged, how often it has changed something, and a digest of the numbers of its training."""

    found: list[Found]
    said: list[str]
    planted: int
    digest: str


class Outcome(NamedTuple):
    """What came of a row.

    Attributes:
        found: the findings in the order of the log.
        said: what else the watch has said.
        has_same_bits: its losses, norms, gradients and weights are those that it has without a watch; only asked of a
            row without a fault and a defect, which does not resume.
    """

    found: list[Found]
    said: list[str]
    has_same_bits: bool


def run_row(script: str, row: dict[str, Any]) -> Outcome:
    """Train a row on its ranks, with its fault.

    Raises:
        RuntimeError: it does not train, or its fault was nowhere planted.
    """
    small, data = make_small_run(row["flags"])
    flags = join(small.flags)
    with tempfile.TemporaryDirectory() as folder:
        first = 0
        if row.get("resumes"):
            flags += (
                "--save",
                folder,
                "--load",
                folder,
                "--save-interval",
                str(STEPS),
                "--override-opt-param-scheduler",
            )
            _run(Job(script, (*flags, "--train-iters", "1"), row["ranks"], data), {})
            first = 1
        job = Job(script, (*flags, "--train-iters", str(STEPS)), row["ranks"], data)
        watched = _run(job._replace(flags=(*job.flags, "--watch-invariants", "1")), row)
        is_clean = "relation" not in row and "not_seen" not in row and not row.get("resumes")
        unwatched = _run(job, row) if is_clean else watched
    has_same_bits = [one.digest for one in watched] == [one.digest for one in unwatched]
    if "where" in row and not any(one.planted for one in watched):
        raise RuntimeError("the fault was nowhere planted")
    said = [line for rank in watched for line in rank.said]
    if not said:
        raise RuntimeError("the watch was not on")
    findings = [one._replace(step=one.step + first) for rank in watched for one in rank.found]
    return Outcome(findings, said, has_same_bits)


def _run(job: Job, row: dict[str, Any]) -> list[Watched]:
    watched = run_with(job, lambda one: _train_rank(one, row))
    if isinstance(watched, Failed):
        raise RuntimeError(watched.error)
    return watched


def _train_rank(job: Job, row: dict[str, Any]) -> Watched:
    log = _Collector()
    logger = logging.getLogger("megatron_overrides.watch")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    planter = Planter(row, int(os.environ["RANK"]))
    planter.install()
    try:
        record = train(job._replace(flags=(*job.flags, *planter.seed())))
    finally:
        for child in multiprocessing.active_children():  # a save starts a process that outlives this one
            child.kill()
    said = [message for message in log.messages if message.startswith("watch: ")]
    return Watched(read_findings(log.messages), said, planter.count, _digest(record))


def _digest(record: Record) -> str:
    digest = blake2b(repr((record.losses, record.norms)).encode())
    for state in (*record.weights, *record.gradients):
        for name, parts in sorted(state.items()):
            digest.update(name.encode())
            for _, _, values in parts:
                digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Collector(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
