"""Forks of this process as ranks: what each printed, and how it ended.

For tests that start ranks themselves, because one of them is killed or trains to its end, and for the warm processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def write_to(log: Path) -> None:
    """Send what this process prints to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def fork(action: Callable[[], object], log: Path) -> int:
    """Run `action` in a fork that leads a process group, then end it: with 0, SystemExit's code, or 1 on an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        write_to(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # pytest may have put its own in their places
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        action()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


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
        codes = _wait(pids, time.monotonic() + limit)
        return [
            Ended(codes[pid], log.read_text(errors="replace") if log.exists() else "")
            for pid, log in zip(pids, logs, strict=True)
        ]


def _wait(pids: list[int], until: float) -> dict[int, int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                kill(pid, group_only=True)  # a fork runs no exit handlers, which would end what it has started
        if any(codes.values()) or time.monotonic() > until:
            for pid in [pid for pid in pids if pid not in codes]:
                kill(pid)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    return codes


def kill(pid: int, group_only: bool = False) -> None:
    """Kill a fork and what it has started; with `group_only`, because it has ended, only the latter."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
