"""ci/noticed_edits.json: which test notices that an edit of the patches is missing, on which releases.

The releases that do not run every test in CI run these (noxfile.py), and `--drop-edits` tries them first. In the place
of a test, "changes nothing" has the releases in which the edit has nothing to change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "ci/noticed_edits.json"
CHANGES_NOTHING = "changes nothing"


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

    def answered(self, edit: str) -> bool:
        """Return whether a test of this release is known to notice `edit`, or the edit to change nothing there."""
        return any(self.release in releases for releases in self.rows.get(edit, {}).values())

    def record(self, tests: Mapping[str, str | None]) -> None:
        """Write {edit: the test of this release that notices that it is missing, if any does}; one edit on a line."""
        for edit, test in tests.items():
            row = {other: {*releases} - {self.release} for other, releases in self.rows.get(edit, {}).items()}
            if test is not None:
                row.setdefault(test, set()).add(self.release)
            self.rows[edit] = {other: sorted(releases) for other, releases in sorted(row.items()) if releases}
        lines = [f" {json.dumps(edit)}: {json.dumps(row)}" for edit, row in sorted(self.rows.items()) if row]
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
