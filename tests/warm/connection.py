"""The process of pytest's side of the warm processes: starts them, and forks of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import server
from .levels import LEVELS

FOLDER = Path(__file__).resolve().parents[2]


class Messages:
    """The lines of JSON that come from a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ended = False
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Those that are complete, after waiting for something; none at the end."""
        data = os.read(self.descriptor, 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        os.close(self.descriptor)


class LevelFailed(Exception):
    """A warm process could not import what its level wants; the message is the traceback."""


@dataclass
class Forks:
    """The ranks of a job.

    Attributes:
        pids: their process ids, by rank.
        ranks: what each reports.
        control: tells of the end of each, as {"rank": R, "code": C}.
        early: what `control` has told already.
    """

    pids: list[int]
    ranks: list[Messages]
    control: Messages
    early: list[dict[str, Any]]


class WarmProcesses:
    """The warm processes of one `python`, with `path` on their path; each is started when it is first asked for."""

    def __init__(self, path: list[str], python: str = sys.executable) -> None:
        self.path = path
        self.python = python
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.process: subprocess.Popen[bytes] | None = None
        self.reached: dict[str, str] = {}  # level -> "", or why it failed

    def connect(self, level: str) -> socket.socket:
        """A connection to the process of this level.

        Raises:
            LevelFailed: it, or one before it, cannot import what it is for.
        """
        for below, wanted in zip(("", *LEVELS), LEVELS[: LEVELS.index(level) + 1], strict=False):
            if wanted not in self.reached:
                self.reached[wanted] = self._climb(below, wanted) if below else self._start()
            if self.reached[wanted]:
                raise LevelFailed(self.reached[wanted])
        return self._connect(level)

    def _start(self) -> str:
        words = [self.python, "-W", "ignore", server.__file__, self.folder.name, str(FOLDER), *self.path]
        log = Path(self.folder.name, "server.log")
        with log.open("w") as output:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        while not Path(self.folder.name, LEVELS[0]).exists():
            if self.process.poll() is not None:
                return log.read_text(errors="replace")
            time.sleep(0.01)
        return ""

    def _climb(self, below: str, level: str) -> str:
        with self._connect(below) as connection:
            server.send(connection, {"climb": level})
            answer, _ = server.receive(connection)
        if "ready" not in answer:
            return answer.get("error") or Path(self.folder.name, "server.log").read_text(errors="replace")
        while not Path(self.folder.name, level).exists():
            time.sleep(0.01)
        return ""

    def _connect(self, level: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(Path(self.folder.name, level)))
        return connection

    def fork(self, level: str, ranks: int, request: dict[str, Any]) -> Forks:
        """Fork `ranks` processes that run what `request` says; see server.py.

        Raises:
            LevelFailed: as `connect` does.
        """
        connection = self.connect(level)
        pipes = [os.pipe() for _ in range(ranks)]
        writers = [writer for _, writer in pipes]
        data = json.dumps({**request, "level": level, "ranks": ranks}).encode() + b"\n"
        sent = socket.send_fds(connection, [data], writers)
        connection.sendall(data[sent:])
        for writer in writers:
            os.close(writer)
        control = Messages(connection.detach())
        answers: list[dict[str, Any]] = []
        while not answers:
            answers = control.read()
        return Forks(answers[0]["pids"], [Messages(reader) for reader, _ in pipes], control, answers[1:])

    def close(self) -> None:
        """End the warm processes and whatever is left of their forks."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()
