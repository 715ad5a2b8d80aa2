"""One rank: runs tests that the process of their file has collected, and sends the reports of each."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from .processes import be_rank

THREADS_MAY_TAKE = 5.0  # seconds to end


class Rank:
    """A plugin of the collected session, in a fork that is this rank."""

    def __init__(self, pipe: Connection, limit: float) -> None:
        self.pipe = pipe
        self.limit = limit
        self.log = os.fdopen(os.dup(2), "w")  # pytest's capture takes the place of the other
        self.reports: list[pytest.TestReport] = []
        self.threads = set(threading.enumerate())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(THREADS_MAY_TAKE)
        left = set(threading.enumerate()) - self.threads
        self.threads |= left
        if left:
            pytest.fail(f"threads were left behind: {', '.join(thread.name for thread in left)}", pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def run(self, items: list[pytest.Item]) -> None:
        faulthandler.enable(self.log)
        for item, following in zip(items, [*items[1:], None], strict=True):
            faulthandler.dump_traceback_later(self.limit, exit=True, file=self.log)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.pipe.send(self.reports)
            self.reports = []


def run(items: list[pytest.Item], pipe: Connection, rank: int, ranks: int, port: str, limit: float) -> None:
    """Be this rank. A test that takes longer than `limit` seconds ends it, with the stack of each thread in its log."""
    be_rank(rank, ranks, port)
    plugins = items[0].config.pluginmanager
    capture = plugins.get_plugin("capturemanager")
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    plugins.unregister(name="terminalreporter")
    plugins.register(plugin := Rank(pipe, limit))
    plugin.run(items)
    os._exit(0)
