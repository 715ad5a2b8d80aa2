"""`pytest --drop-edits`: does a test notice when an edit that the patches declare is missing?

Each item of such a run is one edit that changes something in this Megatron. Forks of a Megatron without patches apply
the patches without this edit, and run the collected tests until one fails: first the test that noticed it the last
time, then those of the file that mirrors its override, of files that name it, and of those that lie near. The run
writes which test noticed which edit (ci/noticed_edits.json). An edit that no test notices needs a reason in
ci/dropped_edits.toml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import pytest

from scripts.common.toml import read_toml

from . import edits
from .noticed import CHANGES_NOTHING, Noticed
from .plugin import Controller, ForkedFile, ForkedTest, Job, Jobs, tests_by_file
from .reports import Reports, first_failure

SURVIVORS = "ci/dropped_edits.toml"
Tests = dict[ForkedFile, list[ForkedTest]]


class DropEdits:
    """Puts the edits in the place of the collected tests."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.tests: Tests = {}
        self.is_sound: dict[str, bool] = {}  # does a test pass with every edit?
        self.noticed = Noticed(controller.config.rootpath, metadata.version("megatron-core"))

    @pytest.hookimpl(tryfirst=True)  # -k and --deselect choose edits
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self.tests = tests_by_file(items)
        reasons = read_survivors(session.config.rootpath / SURVIVORS, self.noticed.release)
        warm = self.controller.warm
        kind, effective = warm.receive(warm.fork("megatron", edits.send_effective, "edits"), "edits")
        if kind == "failed":
            raise pytest.UsageError(f"the patches cannot be applied:\n{effective}")
        self.noticed.record(dict.fromkeys(edits.megatron_edits().keys() - set(effective), CHANGES_NOTHING))
        items[:] = [
            DroppedEdit.from_parent(session, name=name, nodeid=name, reason=reasons.get(name), run=self)
            for name in effective
        ]
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter._numcollected = len(items)  # it has counted the tests

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        chosen = session.config.option.keyword
        if chosen and not session.items:
            where = f"{chosen!r}: no edit that changes something in {self.noticed.release} has this in its name"
            session.config.get_terminal_writer().line(where)

    def noticing_test(self, edit: str, is_excused: bool) -> ForkedTest | None:
        """A test that fails without this edit; None if no test does, or none near one that is excused."""
        by_id = {test.nodeid: test for tests in self.tests.values() for test in tests}
        for name in self.noticed.candidates(edit):
            if name in by_id and self.first_failure([by_id[name]], edit):
                return by_id[name]
        nearest = sort_by_distance(edit, self.tests, self.controller.config.rootpath)
        if is_excused:
            return self.first_failure(self.tests[nearest[0]], edit)
        return self.first_failure([test for file in nearest for test in self.tests[file]], edit)

    def first_failure(self, tests: list[ForkedTest], without: str) -> ForkedTest | None:
        """One of these tests that fails without this edit, and passes with every edit; None if there is none."""
        for test, reports in self.run_tests(tests, without):
            if first_failure(reports) and self.passes_with_every_edit(test):
                return test
        return None

    def run_tests(self, tests: list[ForkedTest], without: str | None = None) -> Iterator[tuple[ForkedTest, Reports]]:
        """Yield each test with its reports, as they come."""
        start = partial(self.controller.fork, without=without)
        by_file = tests_by_file(tests)
        jobs = Jobs(
            self.controller.warm,
            [Job(list(some), partial(start, file.path, file.level)) for file, some in by_file.items()],
        )
        left = {test.nodeid: test for test in tests}
        try:
            while left:
                jobs.turn(None, None if jobs.running else jobs.waiting[0])
                for name in left.keys() & jobs.reports.keys():
                    yield left.pop(name), jobs.reports.pop(name)
        finally:
            jobs.close()

    def say_unsound(self) -> str:
        """The tests that notice nothing because they fail with every edit as well, as the end of a message."""
        unsound = [name for name, is_sound in self.is_sound.items() if not is_sound]
        return f". These fail with every edit as well: {', '.join(unsound)}" if unsound else ""

    def passes_with_every_edit(self, test: ForkedTest) -> bool:
        if test.nodeid not in self.is_sound:
            ((_, reports),) = self.run_tests([test])
            self.is_sound[test.nodeid] = first_failure(reports) is None
        return self.is_sound[test.nodeid]


class DroppedEdit(pytest.Item):
    """An edit; `reason` says why no test can notice that it is missing."""

    def __init__(self, *, reason: str | None, run: DropEdits, **rest: Any) -> None:
        super().__init__(**rest)
        self.reason, self.run = reason, run
        # -k finds a flag by the name of its field, too, a field by that of its flag, and both by their patch
        for name in (self.name, *(patch for patch, _ in edits.declared()[self.name])):
            self.extra_keyword_matches.update({name.replace("-", "_"), name.replace("_", "-")})

    def runtest(self) -> None:
        test = self.run.noticing_test(self.name, bool(self.reason))
        self.run.noticed.record({self.name: test and test.nodeid})
        if test is None:
            if self.reason:
                pytest.xfail(self.reason)
            said = f"no test notices: write one, or say in {SURVIVORS} why none can{self.run.say_unsound()}"
            pytest.fail(said, pytrace=False)
        self.user_properties.append(("noticed by", test.nodeid))
        if self.reason:
            pytest.fail(f"{test.nodeid} notices: take it out of {SURVIVORS}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"without [{self.name}]"  # pytest replaces dots outside of brackets


def read_survivors(file: Path, release: str) -> dict[str, str]:
    """{edit: why no test of this release can notice that it is missing}.

    Raises:
        pytest.UsageError: no patch declares one of them.
    """
    entries = read_toml(file).get("survivors", []) if file.is_file() else []
    unknown = {edit for entry in entries for edit in entry["edits"]} - edits.declared().keys()
    if unknown:
        raise pytest.UsageError(f"{file} has what no patch declares: {', '.join(sorted(unknown))}")
    return {edit: entry["reason"] for entry in entries if release in entry["releases"] for edit in entry["edits"]}


def sort_by_distance(edit: str, files: Iterable[ForkedFile], root: Path) -> list[ForkedFile]:
    """First the test file that mirrors the module of the edit's override.

    Then those that name what the edit changes or adds, and those near the first in the tree.
    """
    parts = edit.split()
    mirrors = [mirror(part.partition(":")[0]) for part in parts if ":" in part]
    names = [re.split(r"[:.]", part)[-1].strip("-_").replace("-", "_") for part in parts]

    def closeness(file: ForkedFile) -> tuple[bool, int, int]:
        text = file.path.read_text(encoding="utf-8")
        here = file.path.relative_to(root)
        shared = max(len(PurePath(os.path.commonpath([here, other])).parts) for other in mirrors)
        return here.name in {other.name for other in mirrors}, sum(name in text for name in names), shared

    return sorted(files, key=closeness, reverse=True)


def mirror(module: str) -> PurePath:
    """The test file of an override's module."""
    *folders, name = module.split(".")
    return PurePath("tests", *folders, f"test_{name}.py")
