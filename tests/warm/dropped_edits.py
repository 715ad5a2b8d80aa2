"""`pytest --drop-edits`: does a test notice when an edit that the patches declare is missing?

Each item of such a run is one edit that changes something in this Megatron. Forks of a Megatron without patches apply
the patches without this edit, and run the collected tests until one fails: first the file that mirrors the module of
the edit's override, then the files near it. An edit that no test notices needs a reason in ci/dropped_edits.toml.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import pytest

from scripts.common.process import free_port

from . import edits
from .jobs import Job, Jobs, Location, Need
from .plugin import Controller, needs_of

try:
    import tomllib
except ImportError:
    import tomli as tomllib

LEVEL = "megatron"  # the last one at which no override is imported
SURVIVORS = "ci/dropped_edits.toml"


class DropEdits:
    """Puts the edits in the place of the collected tests."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.config = controller.config
        self.needs: dict[Need, dict[str, Location]] = {}
        self.sound: set[str] = set()  # tests that pass with every edit

    @pytest.hookimpl(tryfirst=True)  # -k and --deselect choose edits
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self.needs = needs_of(items)
        reasons = read_survivors(self.config.rootpath / SURVIVORS, metadata.version("megatron-core"))
        chosen = self._find_effective()
        if self.config.option.sample:
            commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=self.config.rootpath)
            noticed = [name for name in chosen if name not in reasons]  # the others take all tests
            chosen = random.Random(commit).sample(noticed, self.config.option.sample)
        items[:] = [
            DroppedEdit.from_parent(session, name=name, nodeid=name, reason=reasons.get(name), run=self)
            for name in chosen
        ]
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter._numcollected = len(items)  # it has counted the tests

    def _find_effective(self) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder, "effective"), Path(folder, "log")
            before = [["tests.warm.edits:write_effective", str(file)]]
            mine = {"before": before, "file": "", "tests": [], "port": free_port(), "log": str(log)}
            forks = self.controller.warm.fork(LEVEL, 1, {**self.controller.request, **mine})
            while not forks.control.ended:
                forks.control.read()
            for source in (*forks.ranks, forks.control):
                source.close()
            if not file.exists():
                raise pytest.UsageError(f"the patches cannot be applied:\n{Path(f'{log}.0').read_text()}")
            return json.loads(file.read_text())

    def first_failure(self, tests: dict[Need, dict[str, Location]], without: str | None) -> str | None:
        """The first of these tests that fails without this edit; None if all pass."""
        before = [["tests.warm.edits:leave_out", without]] if without else []
        made = [Job(*need, places, fork_from=LEVEL) for need, places in tests.items()]
        jobs = Jobs(self.controller.warm, made, {**self.controller.request, "before": before}, self.config)
        try:
            for test in jobs.of_test:
                if any(report.failed for report in jobs.reports_of(test)):
                    return test
        finally:
            jobs.close()
        return None

    def passes_with_every_edit(self, test: str) -> bool:
        if test not in self.sound:
            alone = {need: {test: places[test]} for need, places in self.needs.items() if test in places}
            if self.first_failure(alone, None) is None:
                self.sound.add(test)
        return test in self.sound


class DroppedEdit(pytest.Item):
    """An edit; `reason` says why no test can notice that it is missing."""

    def __init__(self, *, reason: str | None, run: DropEdits, **rest: Any) -> None:
        super().__init__(**rest)
        self.reason, self.run = reason, run
        # -k finds a flag by the name of its field, too, a field by that of its flag, and both by their patch
        for name in (self.name, *edits.patches_with(self.name)):
            self.extra_keyword_matches.update({name.replace("-", "_"), name.replace("_", "-")})

    def runtest(self) -> None:
        test = None
        nearest, *others = sort_by_distance(self.name, self.run.needs, self.config.rootpath)
        for needs in ([nearest], others):
            test = test or self.run.first_failure({need: self.run.needs[need] for need in needs}, self.name)
        if test is None:
            if self.reason:
                pytest.xfail(self.reason)
            pytest.fail(f"no test notices: write one, or say in {SURVIVORS} why none can", pytrace=False)
        self.user_properties.append(("noticed by", test))
        if not self.run.passes_with_every_edit(test):
            pytest.fail(f"{test} fails with this edit, too", pytrace=False)
        if self.reason:
            pytest.fail(f"{test} notices: take it out of {SURVIVORS}", pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"without [{self.name}]"  # pytest replaces dots outside of brackets


def read_survivors(file: Path, release: str) -> dict[str, str]:
    """{edit: why no test of this release can notice that it is missing}.

    Raises:
        pytest.UsageError: no patch declares one of them.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", []) if file.is_file() else []
    unknown = {entry["edit"] for entry in entries} - edits.declared().keys()
    if unknown:
        raise pytest.UsageError(f"{file} has what no patch declares: {', '.join(sorted(unknown))}")
    return {entry["edit"]: entry["reason"] for entry in entries if release in entry["releases"]}


def sort_by_distance(edit: str, needs: Iterable[Need], root: Path) -> list[Need]:
    """First the test file that mirrors the module of the edit's override, or of its target.

    Then those that name what the edit changes or adds, and those near the first in the tree.
    """
    parts = edit.split()
    mirrors = [mirror(part.partition(":")[0]) for part in parts if ":" in part]
    names = [re.split(r"[:.]", part)[-1].strip("-_").replace("-", "_") for part in parts]

    def closeness(need: Need) -> tuple[bool, int, int]:
        file = Path(need[0])
        text = file.read_text(encoding="utf-8")
        shared = max(len(PurePath(os.path.commonpath([file.relative_to(root), other])).parts) for other in mirrors)
        return file.name in {other.name for other in mirrors}, sum(name in text for name in names), shared

    return sorted(needs, key=closeness, reverse=True)


def mirror(module: str) -> PurePath:
    """The test file of an override's module, or of what overrides a module of Megatron."""
    *folders, name = module.split(".")
    places = ("megatron_overrides" if folder == "megatron" else folder for folder in folders)
    return PurePath("tests", *places, f"test_{name}.py")
