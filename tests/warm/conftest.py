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
    """run_tests(source, *options): run this test file, in forks of a process that has imported nothing.

    `folder` is one in which tests have run before; `head` comes first in the file.
    """

    def run(source: str, *options: str, head: str = "", folder: Path | None = None) -> Run:
        tmp_path = folder or tmp_path_factory.mktemp("project")
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.warm.plugin"]\n')
        mark = head or 'import os, pytest\npytestmark = pytest.mark.forked("python")\n'
        (tmp_path / "test_it.py").write_text(mark + textwrap.dedent(source))
        junit = tmp_path / "junit.xml"
        words = ["-q", "-o", "warm_limit=5", f"--junitxml={junit}", f"--rootdir={tmp_path}", *options]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *([] if "::" in "".join(options) else [str(tmp_path)])],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        outcomes, details = {}, {}
        for case in ElementTree.parse(junit).iter("testcase"):
            found = [child for child in case if child.tag in ("failure", "error", "skipped")]
            kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
            outcomes[case.get("name")] = kinds[found[0].tag] if found else "passed"
            details[case.get("name")] = "".join(f"{child.get('message')}\n{child.text}" for child in found)
        return Run(outcomes, details, done.stdout + done.stderr)

    return run
