"""pytest in a fork: collects the file of a job, runs those of its tests that are asked for, and sends what comes of it.

It sends lines of JSON:

    {"items": [...]}                 what it has collected, where it was asked to collect only
    {"problem": TEXT, "in": FILE}    why the file cannot be collected, or {"skipped": TEXT}: why it leaves itself out
    {"start": NODEID}                a test begins
    {"report": {...}}                pytest's report of a phase of that test
    {"finish": NODEID, "threads": [...]}  the test has ended; with threads that it left behind, so has this process
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
from typing import Any

THREADS_MAY_TAKE = 5.0  # seconds to end, each


def run(rank: int, request: dict[str, Any], descriptor: int) -> None:
    """Be one rank of a job, in a process that the warm process has forked. Ends the process."""
    import pytest

    from . import processes

    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"), all_threads=True)
    processes.be_rank(rank, request["ranks"], request["port"])
    os.chdir(request["folder"])
    sys.argv[:] = ["pytest", request["file"]]
    for line, argument in request["before"]:
        module, _, name = line.partition(":")
        getattr(importlib.import_module(module), name)(argument)
    level = request.get("inside", request["level"])
    words = [*request["words"], "-q", "-p", "no:cacheprovider", "-p", "no:timeout", f"--inside={level}"]
    with os.fdopen(descriptor, "w", buffering=1) as channel:
        if request["tests"] is None:
            words.append("--collect-only")
        code = pytest.main([*words, request["file"]], plugins=[Reporter(channel, request)])
        sys.stdout.flush()
    os._exit(int(code))


class Reporter:
    """Runs the chosen tests and sends their reports."""

    def __init__(self, channel: Any, request: dict[str, Any]) -> None:
        self.channel = channel
        self.request = request
        self.problem: dict[str, str] = {}
        self.threads: list[threading.Thread] = []

    def send(self, **message: Any) -> None:
        self.channel.write(json.dumps(message, default=str) + "\n")  # marks may hold anything

    def pytest_configure(self, config: Any) -> None:
        vars(config.option).update(self.request["options"])
        self.config = config
        self.threads = threading.enumerate()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.problem = {"problem": report.longreprtext, "in": report.nodeid}
        elif report.skipped:
            self.problem = {"skipped": report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from .plugin import ranks_of

        if self.request["tests"] == "all":
            ranks = os.environ["WORLD_SIZE"]
            items[:] = [item for item in items if str(ranks_of(item)) == ranks]
        elif self.request["tests"] is not None:
            chosen = {item.nodeid: item for item in items}
            items[:] = [chosen[nodeid] for nodeid in self.request["tests"] if nodeid in chosen]

    def pytest_collection_finish(self, session: Any) -> None:
        if self.problem:
            self.send(**self.problem)
        elif self.request["tests"] is None:
            self.send(items=[describe(item) for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send(start=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.send(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        left = [thread for thread in threading.enumerate() if thread not in self.threads]
        for thread in left:
            thread.join(THREADS_MAY_TAKE)
        names = [thread.name for thread in left if thread.is_alive()]
        self.send(finish=nodeid, threads=names)
        if names:
            os._exit(0)


def describe(item: Any) -> dict[str, Any]:
    """What the process that runs pytest must know of a test to choose it by name, mark or place."""
    return {
        "nodeid": item.nodeid,
        "location": item.location,
        "marks": [[mark.name, mark.args] for mark in item.iter_markers() if mark.name != "parametrize"],
        "ranks": getattr(item, "callspec", None) and item.callspec.params.get("number_of_ranks"),
        "keywords": [*item.listextrakeywords()] if hasattr(item, "listextrakeywords") else [],
    }
