"""The warm processes: one for each level, which forks what it is told to, and is itself a fork of another level."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from scripts.common.forks import fork

from . import levels

# modelopt imports pyarrow, which starts it; the allocator goes on without it in a fork.
JEMALLOC_THREAD = "jemalloc_bg_thd\n"
# pytest's own process may have imported anything.
START = "import sys; sys.path[:] = sys.argv[2:]; from tests.warm.server import serve; serve(sys.argv[1], 'python')"


class LevelFailed(Exception):
    """A warm process cannot import what its level wants; the message is the traceback."""


class WarmProcesses:
    """The warm processes of this process: the first starts at once, the others when they are asked for."""

    def __init__(self) -> None:
        self.listener = Listener(family="AF_UNIX")
        self.logs = tempfile.TemporaryDirectory(prefix="warm-")
        self.connections: dict[str, Connection] = {}
        self.problems: dict[str, str] = {}  # level -> why it cannot be reached, or ""
        words = [sys.executable, "-W", "ignore", "-c", START, self.listener.address, *sys.path]
        with Path(self.logs.name, "python").open("w") as log:
            self.first = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        self.connections["python"] = self.listener.accept()

    def fork(self, level: str, action: Callable[..., object], log: str) -> Connection:
        """Have the process of `level` fork, and the fork run action(address of self.listener); return its connection.

        Raises:
            LevelFailed: that process, or one before it, cannot import what it is for.
        """
        if level not in self.connections:
            self.connections[level] = self.fork(levels.LEVELS[level].origin, partial(serve, level=level), level)
        if level not in self.problems:
            kind, text = self.receive(self.connections[level], level)
            self.problems[level] = text if kind == "failed" else ""
        if self.problems[level]:
            raise LevelFailed(f"the process of level {level!r} cannot be made:\n{self.problems[level]}")
        self.connections[level].send((partial(action, self.listener.address), Path(self.logs.name, log)))
        return self.listener.accept()

    def receive(self, connection: Connection, log: str) -> tuple[str, Any]:
        """The next (kind, content) that a fork sends; ("failed", what it has printed) where it has ended."""
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return "failed", Path(self.logs.name, log).read_text(errors="replace")

    def close(self) -> None:
        """Wait for the warm processes, which end, and end their forks, when their connections are closed."""
        for connection in self.connections.values():
            connection.close()
        self.first.wait()
        self.listener.close()
        self.logs.cleanup()


def serve(address: str, level: str) -> None:
    """Reach `level`, then fork what is asked for until pytest closes the connection."""
    with Client(address) as connection:
        try:
            levels.climb(level)
            threads = [
                task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() != JEMALLOC_THREAD
            ]
            if len(threads) > 1:
                raise RuntimeError(f"level {level} has {len(threads)} threads; forks of it would lose all but one")
            gc.collect()
            gc.freeze()
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            return
        connection.send(("ready", level))
        with contextlib.suppress(EOFError):
            while True:
                fork(*connection.recv())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # their processor time counts as this process's
