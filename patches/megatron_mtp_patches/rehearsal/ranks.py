"""Forks of this process as ranks, which send back what they return; what they print goes nowhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from ..engine import UsageError

LONGEST_ERROR = 160
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Returned(NamedTuple):
    """What a rank has returned, or its `error` in one line, which is '' where it returned."""

    value: Any
    error: str = ""


def has_lost_another(error: str) -> bool:
    """True if the error of a rank is only that another one has ended, which then says why."""
    return "gloo/transport" in error


def run_ranks(ranks: int, action: Callable[[], Any], limit: float) -> list[Returned]:
    """What `action` returns in forks with the variables of torchrun, by rank.

    A rank that does not end within `limit` seconds, counted for all together, or dies, has an error that says so.
    """
    reservation = socket.socket()  # as long as it is open, nobody who asks for any port gets this one
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's listener does
    reservation.bind(("", 0))
    forks = [_fork(rank, ranks, str(reservation.getsockname()[1]), action) for rank in range(ranks)]
    until = time.monotonic() + limit
    returned = []
    try:
        for _, pipe in forks:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                returned.append(Returned(None, f"nothing within {limit:.0f} s"))
                continue
            try:
                returned.append(pipe.recv())
            except EOFError:
                returned.append(Returned(None, "the process has died"))
    finally:
        for pid, pipe in forks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with what it has started: writers of a checkpoint outlive their rank
            os.waitpid(pid, 0)
            pipe.close()
        reservation.close()
    return returned


def _fork(rank: int, ranks: int, port: str, action: Callable[[], Any]) -> tuple[int, Connection]:
    receiver, sender = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        sender.close()
        return pid, receiver
    os.setpgid(0, 0)
    _end_with_parent()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        returned = Returned(action())
    except BaseException as error:
        returned = Returned(None, _describe(error))
    sender.send(returned)
    os._exit(0)


def _end_with_parent() -> None:
    """Have this process killed when its parent ends, however it does; Linux alone can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _describe(error: BaseException) -> str:
    """The first line of an error, or where it has none the line that raised it; all of one that says what to change.

    Of torch's CheckpointException, which has the errors of all ranks, that of the first rank that has one.
    """
    if isinstance(error, UsageError):
        return " ".join(str(error).split())[: 2 * LONGEST_ERROR]
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    text = f"{type(error).__name__}: {str(error).strip() or _describe_place(error)}"
    return text.partition("\n")[0].removesuffix(": ")[:LONGEST_ERROR]


def _describe_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({Path(frames[-1].filename).name})" if frames else ""
