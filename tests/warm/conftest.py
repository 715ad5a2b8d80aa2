"""Projects of a few tests, each run by a separate pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


@dataclass(frozen=True)
class Run:
    """What came of a run of pytest.

    Attributes:
        outcomes: {test: "passed", "failed", "error" or "skipped"}, as in the JUnit report.
        details: {test: the text of its failure or error}.
        output: what pytest printed.
    """

    outcomes: dict[str, str]
    details: dict[str, str]
    output: str


@pytest.fixture(scope="module")
def run_tests(tmp_path_factory):
    """run_tests(source, *options, marks=..., folder=None): run this test file, in a new folder unless one is given."""

    def run(source: str, *options: str, marks: str = 'pytest.mark.forked("python")', folder: Path | None = None) -> Run:
        folder = folder or tmp_path_factory.mktemp("project")
        (folder / "conftest.py").write_text('pytest_plugins = ["tests.warm.plugin"]\n')
        (folder / "test_it.py").write_text(f"import os, pytest\npytestmark = {marks}\n{textwrap.dedent(source)}")
        words = ["-q", "-o", "warm_limit=7", "--junitxml=junit.xml", f"--rootdir={folder}", *options]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        outcomes, details = {}, {}
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
            ends = [child for child in case if child.tag in OUTCOMES]
            outcomes[case.get("name")] = OUTCOMES[ends[0].tag] if ends else "passed"
            details[case.get("name")] = "".join(f"{end.get('message')}\n{end.text}" for end in ends)
        return Run(outcomes, details, done.stdout + done.stderr)

    return run
