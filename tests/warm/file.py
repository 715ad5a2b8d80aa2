"""The process of a test file: collects it, then runs those of its tests that are asked for on forked ranks.

It sends pytest's process (kind, content):

    ("collected", [...])             the tests of the file, or
    ("skipped", TEXT)                why the file leaves itself out, or ("failed", TEXT): why it cannot be collected
    ("reports", [...])               what came of the next test, in the order in which they were asked for
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from multiprocessing.connection import Client, Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from scripts.common.forks import fork, kill
from scripts.common.process import free_port

from . import edits, rank
from .reports import Reports, fail, first_failure, merge

OTHERS_MAY_TAKE = 10.0  # seconds to end a test that has failed on another rank
LAST = 8000  # characters of what a rank printed
PYTEST = re.compile("/_?(pytest|pluggy)/|<frozen runpy>")


def run(
    address: str,
    words: list[str],
    file: Path,
    level: str,
    without: str | None,
    options: dict[str, Any],
    limit: float,
) -> None:
    """Be the process of a file, in a fork of a warm process of its level, or of one before it.

    Args:
        words: of the command line of its pytest.
        without: an edit that is left out of the patches.
        options: that it shares with the first pytest.
        limit: the seconds after which a test counts as hanging.
    """
    with Client(address) as connection:
        if without:
            edits.leave_out(without)
        sys.argv[:] = ["pytest", str(file)]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        off = ("-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:faulthandler")
        process = FileProcess(connection, options, limit)
        pytest.main([*words, *off, "--inside", level, str(file)], plugins=[process])


class FileProcess:
    """A plugin of the pytest that collects the file."""

    def __init__(self, connection: Connection, options: dict[str, Any], limit: float) -> None:
        self.connection, self.options, self.limit = connection, options, limit
        self.problem: tuple[str, str] | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        vars(config.option).update(self.options)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.problem = (report.outcome, text.removeprefix("Skipped: "))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        self.connection.send(self.problem or ("collected", [describe(item) for item in session.items]))
        session.config.pluginmanager.get_plugin("capturemanager").stop_global_capturing()  # each rank starts its own
        with contextlib.suppress(EOFError):  # pytest has ended, or needs no more of this file
            chosen = self.connection.recv()
            for ranks, items in groupby((tests[nodeid] for nodeid in chosen), ranks_of):
                self.run_tests(list(items), ranks)
            self.connection.recv()
        return True

    def run_tests(self, waiting: list[pytest.Item], ranks: int) -> None:
        """Run these on `ranks` forks; on new ones after a test that failed on some ranks only, or ended its process."""
        while waiting:
            with Forks(waiting, ranks, self.limit, self.connection) as forks:
                while waiting:
                    reports = forks.wait_for(waiting.pop(0))
                    self.connection.send(("reports", reports))
                    if first_failure(reports) and (ranks > 1 or forks.ranks[0].code is not None):
                        break


@dataclass
class Fork:
    """A rank, as the process that forked it sees it.

    Attributes:
        pipe: sends the reports of each test; None once it is closed.
        code: its exit code, once it has ended.
        reports: those of tests that have ended on this rank, but not on all.
    """

    pid: int
    pipe: Connection | None
    log: Path
    code: int | None = None
    reports: list[Reports] = field(default_factory=list)

    def look(self) -> None:
        """Has it ended?"""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)

    def receive(self) -> None:
        try:
            self.reports.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.pipe = None

    def outcome(self, limit: float) -> str:
        """What came of the test that has not ended on all ranks."""
        if self.reports:
            failure = first_failure(self.reports[0])
            return failure.longreprtext if failure else "passed"
        if self.code is None:
            return f"did not end within {OTHERS_MAY_TAKE:.0f} s of a failure on another rank"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        if "Timeout (" in self.printed():
            return f"did not end within {limit:.0f} s"
        return f"ended with exit code {self.code}"

    def printed(self) -> str:
        """What it wrote itself, and of its stack what is not pytest's."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not PYTEST.search(line))[-LAST:]

    def end(self) -> None:
        """Kill it and what it has started."""
        kill(self.pid, group_only=self.code is not None)
        if self.code is None:
            os.waitpid(self.pid, 0)


class Forks:
    """The ranks that run some tests. They are killed at the end, or when pytest closes its `connection`."""

    def __init__(self, items: list[pytest.Item], ranks: int, limit: float, connection: Connection) -> None:
        self.limit, self.connection = limit, connection
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks: list[Fork] = []
        port = free_port()
        for number in range(ranks):
            pipe, end = Pipe(duplex=False)
            log = Path(self.folder.name, str(number))
            pid = fork(partial(rank.run, items, end, number, ranks, port, limit), log)
            self.ranks.append(Fork(pid, pipe, log))
            end.close()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.ranks:
            one.end()
        self.folder.cleanup()

    def wait_for(self, test: pytest.Item) -> Reports:
        """The reports of `test`, the next one: of all ranks, or of those that did not end it."""
        until = math.inf
        while slow := [one for one in self.ranks if not one.reports]:
            for one in slow:
                one.look()
            ready = wait([self.connection, *(one.pipe for one in slow if one.pipe)], 0.1)
            if self.connection in ready:
                raise EOFError
            # A process that it has started may keep the pipe of a rank open: then nothing more comes.
            lost = [one for one in slow if one.code is not None and one.pipe not in ready]
            if lost or any(first_failure(one.reports[0]) for one in self.ranks if one.reports):
                until = min(until, time.monotonic() + OTHERS_MAY_TAKE)
            if len(lost) == len(slow) or time.monotonic() > until:
                return self.fail(test)
            for one in slow:
                if one.pipe in ready:
                    one.receive()
        return merge([one.reports.pop(0) for one in self.ranks])

    def fail(self, test: pytest.Item) -> Reports:
        outcomes = [one.outcome(self.limit) for one in self.ranks]
        for one in self.ranks:
            if one.code is None and not one.reports:
                os.kill(one.pid, signal.SIGABRT)  # it writes where it is
        if len(self.ranks) > 1:
            outcomes = [f"rank {number}: {outcome}" for number, outcome in enumerate(outcomes)]
        outcomes.sort(key=lambda outcome: outcome.endswith(": passed"))
        time.sleep(0.2)
        sections = [(f"printed by rank {number}", one.printed()) for number, one in enumerate(self.ranks)]
        return fail(test.nodeid, test.location, "\n".join(outcomes), sections)


def ranks_of(item: pytest.Item) -> int:
    return getattr(item, "callspec", None) and item.callspec.params.get("number_of_ranks") or 1


def describe(item: pytest.Item) -> dict[str, Any]:
    """What pytest's process must know of a test to choose it by name or mark."""
    marks = {mark.name for mark in item.iter_markers()}
    return {"nodeid": item.nodeid, "location": item.location, "marks": marks, "ranks": ranks_of(item)}
