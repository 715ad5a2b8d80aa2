"""pytest's hooks: files marked `forked` are collected and run in forks of warm processes. See the package's header."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from scripts.common.process import free_port

from . import levels
from .connection import Forks, LevelFailed, WarmProcesses
from .jobs import Job, Jobs, Location, Need

COLLECTED_AT_ONCE = 3  # files
# What a fork is told of the command line. It is given its tests, and what comes of them is told elsewhere.
_TOLD = ("tbstyle", "showlocals", "update_golden", "write_tables")


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
    group.addoption("--sample", type=int, metavar="N", help="leave out only N edits, others with each commit")
    parser.addini("warm_limit", "seconds after which a forked test counts as hanging", default="900")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "forked(level): run in a fork of a process that has imported this much")
    config.addinivalue_line("markers", "ranks(n, ...): run on n forked ranks, once for each n")
    config.addinivalue_line("markers", "real_process(why): starts interpreters, where a fork would not do")
    if config.option.inside:
        levels.climb(config.option.inside)
    else:
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
    started, wanted = int(os.environ.get("WORLD_SIZE", "1")), ranks_of(item)
    if started != wanted:
        pytest.skip(f"runs on {wanted} ranks: torchrun --nproc-per-node {wanted} -m pytest --inside ...")


def level_of(item: pytest.Item) -> str | None:
    """The level that the test asks for; None where it runs in pytest's own process."""
    mark = item.get_closest_marker("forked")
    return mark.args[0] if mark else None


def ranks_of(item: pytest.Item) -> int:
    if isinstance(item, ForkedTest):
        return item.ranks
    return getattr(item, "callspec", None) and item.callspec.params.get("number_of_ranks") or 1  # type: ignore[attr-defined]


def needs_of(items: Iterable[pytest.Item]) -> dict[Need, dict[str, Location]]:
    """{need: {test: where it is}} of the forked tests."""
    needs: dict[Need, dict[str, Location]] = {}
    for item in items:
        level = level_of(item)
        if level:
            needs.setdefault((str(item.path), level, ranks_of(item)), {})[item.nodeid] = item.location
    return needs


class Controller:
    """Collects and runs forked tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        path = [str(config.rootpath / folder) for folder in config.getini("pythonpath")]
        self.warm = WarmProcesses(path)
        self.jobs: Jobs | None = None
        self.files: list[ForkedFile] = []
        self.request = {
            "folder": str(config.rootpath),
            "words": ["--rootdir", str(config.rootpath), *(["-c", str(config.inipath)] if config.inipath else [])],
            "options": {name: value for name, value in vars(config.option).items() if name in _TOLD},
            "before": [],
        }

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> ForkedFile | None:
        level = levels.declared_level(module_path)
        if level is None:
            return None
        file = ForkedFile.from_parent(parent, path=module_path, level=level, controller=self)
        self.files.append(file)
        return file

    def collect(self, file: ForkedFile) -> dict[str, Any]:
        """What a fork says of `file` when it collects it; forks for the files that come next are started."""
        at = self.files.index(file)
        for coming in self.files[at : at + COLLECTED_AT_ONCE]:
            if coming.collection is None and coming.level == file.level:
                coming.collection = Collection(self.warm, coming, self.request)
        assert file.collection
        return file.collection.result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        jobs = [Job(*need, tests) for need, tests in needs_of(session.items).items()]
        self.jobs = Jobs(self.warm, jobs, self.request, self.config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        assert self.jobs
        if level_of(item) is None:
            self.jobs.poll()
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.jobs.reports_of(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # folders that a test of this process has set up before
        return True

    def pytest_unconfigure(self) -> None:
        if self.jobs:
            self.jobs.close()
        self.warm.close()


class Collection:
    """A fork that collects a file."""

    def __init__(self, warm: WarmProcesses, file: ForkedFile, request: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-log-")
        self.log = Path(self.folder.name, "rank")
        mine = {"file": str(file.path), "tests": None, "port": free_port(), "log": str(self.log)}
        self.forks: Forks | None = None
        self.problem = ""
        try:
            self.forks = warm.fork(file.level, 1, {**request, **mine})
        except LevelFailed as failed:
            self.problem = f"the process of level {file.level!r} cannot be made:\n{failed}"

    @cached_property
    def result(self) -> dict[str, Any]:
        """What the fork says, once it has ended; see inside.py."""
        if self.forks is None:
            return {"problem": self.problem}
        said: dict[str, Any] = {}
        (rank,) = self.forks.ranks
        while not rank.ended:
            for message in rank.read():
                said |= message
        for source in (rank, self.forks.control):
            source.close()
        return said or {"problem": Path(f"{self.log}.0").read_text(errors="replace")}


class ForkedFile(pytest.File):
    """A test file that is collected in a fork of the process that its tests need."""

    def __init__(self, *, level: str, controller: Controller, **rest: Any) -> None:
        super().__init__(**rest)
        self.level, self.controller = level, controller
        self.collection: Collection | None = None

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        try:
            levels.check(self.level)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        package = levels.missing(self.level)
        if package:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
        found = self.controller.collect(self)
        if "skipped" in found:
            pytest.skip(found["skipped"].removeprefix("Skipped: "), allow_module_level=True)
        if "items" not in found:
            raise self.CollectError(found["problem"])
        items = sorted(found["items"], key=lambda item: item["ranks"] or 1)  # forks serve one number of ranks
        yield from _nodes(self, [(item["nodeid"].split("::", 1)[1], item) for item in items])


class ForkedClass(pytest.Collector):
    """A class of tests in such a file."""

    def __init__(self, *, items: list[tuple[str, dict[str, Any]]], **rest: Any) -> None:
        super().__init__(**rest)
        self.items = items

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        yield from _nodes(self, self.items)


class ForkedTest(pytest.Item):
    """A test of such a file: what the fork has said of it."""

    def __init__(self, *, described: dict[str, Any], **rest: Any) -> None:
        super().__init__(**rest)
        self.described = described
        self.ranks: int = described["ranks"] or 1
        self.extra_keyword_matches.update(described["keywords"])
        for name, args in reversed(described["marks"]):
            self.add_marker(getattr(pytest.mark, name).with_args(*args))

    def runtest(self) -> None:
        raise AssertionError("a forked test runs in its fork")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        _, line, name = self.described["location"]
        return self.path, line, name


def _nodes(
    parent: pytest.Collector, items: list[tuple[str, dict[str, Any]]]
) -> Iterator[pytest.Item | pytest.Collector]:
    """The tests at this place, and the classes with those below them; `items` has each one's name from here on."""
    classes: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, described in items:
        head, separator, rest = name.partition("::")
        if separator and "[" not in head:
            classes.setdefault(head, []).append((rest, described))
        else:
            yield ForkedTest.from_parent(parent, name=name, nodeid=described["nodeid"], described=described)
    for name, below in classes.items():
        yield ForkedClass.from_parent(parent, name=name, items=below)
