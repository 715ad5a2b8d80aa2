"""Run tests of this repository, and write how many passed and why others did not.

python -m scripts.gpu.suites RESULT TEST ...
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from scripts.common.process import ROOT

REASON = 300  # characters of why a test failed


def main() -> int:
    file, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        code = subprocess.run([sys.executable, *words], cwd=ROOT).returncode
        Path(file).write_text(json.dumps(summarize(report)), encoding="utf-8")
    return code


def summarize(report: Path) -> dict[str, object]:
    """{"counts": {outcome: how many}, "failures": {test: reason}} of a JUnit report."""
    counts: Counter[str] = Counter()
    failures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag: child for child in case}
        outcome = next((name for name in ("error", "failure", "skipped") if name in ends), "passed")
        counts[outcome] += 1
        if outcome in ("error", "failure"):
            reason = ends[outcome].get("message") or ""
            failures[f"{case.get('classname')}.{case.get('name')}"] = " ".join(reason.split())[:REASON]
    return {"counts": counts, "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
