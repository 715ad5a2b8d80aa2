"""Forks of this process as ranks: what each printed, and how it ended.

For tests that start ranks themselves, because one of them is killed or trains to its end, and for the warm processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.common.forks import fork, wait
from scripts.common.process import free_port, rank_variables

LIMIT = 600.0  # seconds; only for what hangs: a busy machine may be slow
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """How a forked rank ended.

    Attributes:
        code: its exit code; negative, the signal that killed it; None where it was killed after the limit.
        output: what it wrote to stdout and stderr.
    """

    code: int | None
    output: str


def be_rank(rank: int, ranks: int, port: str) -> None:
    """Set the variables that torchrun would set."""
    os.environ.update(rank_variables(rank, ranks, port))


def run_ranks(ranks: int, action: Callable[[], object], limit: float = LIMIT) -> list[Ended]:
    """Run `action` in `ranks` forks, which have the variables of torchrun; how each ended, in their order.

    When one fails, or the limit has passed, the others are killed, as torchrun does.
    """
    port = free_port()

    def start(rank: int) -> None:
        be_rank(rank, ranks, port)
        action()

    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        pids = [fork(lambda rank=rank: start(rank), log) for rank, log in enumerate(logs)]
        codes = wait(pids, time.monotonic() + limit)
        return [
            Ended(codes[pid], log.read_text(errors="replace") if log.exists() else "")
            for pid, log in zip(pids, logs, strict=True)
        ]
