"""ci/noticed_edits.json: which test notices that an edit of the patches is missing, on which releases.

The releases that do not run every test in CI run these (noxfile.py), and `--drop-edits` tries them first.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "ci/noticed_edits.json"


class Noticed:
    """The rows of the file: {edit: {test: releases}}."""

    def __init__(self, root: Path, release: str) -> None:
        self.path, self.release = root / FILE, release
        self.rows: dict[str, dict[str, list[str]]] = {}
        if self.path.is_file():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))

    def candidates(self, edit: str) -> list[str]:
        """The tests that notice this edit on some release; first that of this release."""
        tests = self.rows.get(edit, {})
        return sorted(tests, key=lambda test: self.release not in tests[test])

    def record(self, edit: str, test: str | None) -> None:
        """Write which test of this release notices that `edit` is missing, if any does; one edit on a line."""
        tests = self.rows.get(edit, {})
        tests = {other: [one for one in releases if one != self.release] for other, releases in tests.items()}
        if test is not None:
            tests[test] = sorted([*tests.get(test, []), self.release])
        self.rows[edit] = {other: releases for other, releases in tests.items() if releases}
        lines = [f" {json.dumps(edit)}: {json.dumps(tests)}" for edit, tests in sorted(self.rows.items()) if tests]
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
