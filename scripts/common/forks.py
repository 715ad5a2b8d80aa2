"""Forks of this process, which print to files: the ranks of a test, the runs of the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path


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


def write_to(log: Path) -> None:
    """Send what this process prints to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def wait(pids: Collection[int], until: float) -> dict[int, int | None]:
    """Return the exit code of each fork: negative, the signal that killed it; None, it was killed here.

    When one fails, or time.monotonic() has passed `until`, or this function is interrupted, the others are killed, as
    torchrun does.
    """
    codes: dict[int, int | None] = {}

    def kill_others() -> None:
        for pid in [pid for pid in pids if pid not in codes]:
            kill(pid)
            os.waitpid(pid, 0)
            codes[pid] = None

    try:
        while len(codes) < len(pids):
            for pid in [pid for pid in pids if pid not in codes]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    kill(pid, group_only=True)  # a fork runs no exit handlers, which would end what it has started
            if any(codes.values()) or time.monotonic() > until:
                kill_others()
            time.sleep(0.01)
    finally:
        kill_others()
    return codes


def kill(pid: int, group_only: bool = False) -> None:
    """Kill a fork and what it has started; with `group_only`, because it has ended, only the latter."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
