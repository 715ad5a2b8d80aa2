"""pytest's hooks: files marked `forked` are collected and run in forks of warm processes. See the package's header."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from . import file, levels
from .file import ranks_of
from .reports import Reports, fail
from .server import LevelFailed, WarmProcesses

RANKS_PER_PROCESSOR = 2  # ranks wait for each other, and for what they start
# Of the command line, with the processes of the files.
SHARED_OPTIONS = ("tbstyle", "showlocals", "update_golden", "write_tables", "everywhere")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("warm processes")
    group.addoption(
        "--inside",
        choices=levels.LEVELS,
        help="run forked tests in this process, brought to this level: for a debugger, or under torchrun",
    )
    group.addoption(
        "--drop-edits",
        action="store_true",
        help="leave out each edit of the patches: does a test fail? -k chooses by target, override, field or flag",
    )
    group.addoption("--everywhere", action="store_true", help="also what CI runs on some of the releases only")
    parser.addini("warm_limit", "seconds after which a forked test counts as hanging", default="900")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "forked(level): run in a fork of a process that has imported this much")
    config.addinivalue_line("markers", "ranks(n, ...): run on n forked ranks, once for each n")
    config.addinivalue_line("markers", "guards(id, ...): notices that these patches do not do what they are for")
    config.addinivalue_line("markers", "real_process(why): starts interpreters, where a fork would not do")
    if config.option.inside:
        levels.climb(config.option.inside)
        return
    controller = Controller(config)
    config.pluginmanager.register(controller, "warm processes")
    if config.option.drop_edits:
        from .dropped_edits import DropEdits

        config.pluginmanager.register(DropEdits(controller), "dropped edits")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark:
        metafunc.fixturenames.insert(0, "number_of_ranks")
        ids = [f"{number} ranks" for number in mark.args]
        metafunc.parametrize("number_of_ranks", mark.args, ids=ids, scope="module")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) != ranks_of(item):
        pytest.skip(f"runs under torchrun --nproc-per-node {ranks_of(item)} -m pytest --inside ...")


class Controller:
    """Collects and runs forked tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.limit = float(config.getini("warm_limit"))
        self.warm = WarmProcesses()
        self.files: list[ForkedFile] = []
        self.jobs: Jobs | None = None

    def fork(self, path: Path, level: str, without: str | None = None) -> Connection:
        """The process of a file, perhaps `without` an edit of the patches. Raises LevelFailed."""
        config = self.config
        words = ["-q", "--rootdir", str(config.rootpath), *(["-c", str(config.inipath)] if config.inipath else [])]
        options = {name: value for name, value in vars(config.option).items() if name in SHARED_OPTIONS}
        run = partial(
            file.run,
            words=words,
            file=path,
            level=level,
            without=without,
            options=options,
            limit=self.limit,
        )
        origin = "megatron" if without and level == "patched" else level  # the last at which no override is imported
        return self.warm.fork(origin, run, path.name)

    def start(self, forked_file: ForkedFile) -> None:
        """Have this file, and the next one, collected."""
        at = self.files.index(forked_file)
        for coming in self.files[at : at + 2]:
            if coming.connection is None and coming.level == forked_file.level:
                coming.connection = self.fork(coming.path, coming.level)

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> ForkedFile | None:
        level = levels.declared_level(module_path)
        if level is None:
            return None
        self.files.append(ForkedFile.from_parent(parent, path=module_path, level=level, controller=self))
        return self.files[-1]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        tests = tests_by_file(session.items)
        for forked_file in self.files:
            if forked_file.connection and forked_file not in tests:
                forked_file.connection.close()
        jobs = [Job(some, partial(getattr, forked_file, "connection")) for forked_file, some in tests.items()]
        self.jobs = Jobs(self.warm, jobs)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        assert self.jobs
        if not isinstance(item, ForkedTest):
            self.jobs.turn(0)
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.jobs.reports_of(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # folders that a test of this process has set up before
        return True

    def pytest_unconfigure(self) -> None:
        for forked_file in self.files:
            if forked_file.connection:
                forked_file.connection.close()
        self.warm.close()


def tests_by_file(items: Iterable[pytest.Item]) -> dict[ForkedFile, list[ForkedTest]]:
    tests: dict[ForkedFile, list[ForkedTest]] = {}
    for item in items:
        if isinstance(item, ForkedTest):
            tests.setdefault(item.parent, []).append(item)
    return tests


class ForkedFile(pytest.File):
    """A test file that is collected in a fork of the process that its tests need."""

    def __init__(self, *, level: str, controller: Controller, **rest: Any) -> None:
        super().__init__(**rest)
        self.level, self.controller = level, controller
        self.connection: Connection | None = None

    def collect(self) -> Iterator[pytest.Item]:
        package = levels.missing(self.level)
        if package:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
        try:
            self.controller.start(self)
        except LevelFailed as error:
            raise self.CollectError(str(error)) from None
        kind, content = self.controller.warm.receive(self.connection, self.path.name)
        if kind == "skipped":
            pytest.skip(content, allow_module_level=True)
        if kind == "failed":
            raise self.CollectError(content)
        for test in sorted(content, key=lambda test: test["ranks"]):
            name = test["nodeid"].split("::", 1)[1]
            yield ForkedTest.from_parent(self, name=name, nodeid=test["nodeid"], described=test)


class ForkedTest(pytest.Item):
    """A test of such a file: what its process has told of it."""

    def __init__(self, *, described: dict[str, Any], **rest: Any) -> None:
        super().__init__(**rest)
        self.location = described["location"]
        self.ranks: int = described["ranks"]
        for mark in described["marks"]:
            self.add_marker(mark)

    def runtest(self) -> None:
        raise AssertionError("a forked test runs in its fork")


class Job:
    """Tests of one file, in this order; `start` returns the connection of a process that has collected the file."""

    def __init__(self, tests: list[ForkedTest], start: Callable[[], Connection]) -> None:
        self.path, self.tests, self.start = tests[0].path, tests, start
        self.ranks = max(test.ranks for test in tests)


class Jobs:
    """Runs jobs ahead of the test that is asked for, as far as processors are free."""

    def __init__(self, warm: WarmProcesses, jobs: list[Job]) -> None:
        self.warm, self.waiting = warm, jobs
        self.job_of = {test.nodeid: job for job in jobs for test in job.tests}
        self.running: dict[Connection, Job] = {}
        self.reports: dict[str, Reports] = {}

    def reports_of(self, test: str) -> Reports:
        """Wait for `test`, which belongs to one of the jobs."""
        while test not in self.reports:
            self.turn(None, self.job_of[test])
        return self.reports.pop(test)

    def turn(self, seconds: float | None, wanted: Job | None = None) -> None:
        """Start what can be started, and take in what comes within some seconds."""
        for job in list(self.waiting):
            free = RANKS_PER_PROCESSOR * len(os.sched_getaffinity(0)) - sum(one.ranks for one in self.running.values())
            if job is wanted or job.ranks <= free:
                self.waiting.remove(job)
                connection = job.start()
                connection.send([test.nodeid for test in job.tests])
                self.running[connection] = job
        for connection in wait(list(self.running), seconds):
            job = self.running[connection]
            kind, content = self.warm.receive(connection, job.path.name)
            if kind == "reports":
                self.reports[job.tests.pop(0).nodeid] = content
            elif kind != "collected":
                self.reports |= {test.nodeid: fail(test.nodeid, test.location, content) for test in job.tests}
                job.tests.clear()
            if not job.tests:
                del self.running[connection]
                connection.close()

    def close(self) -> None:
        for connection in self.running:
            connection.close()
