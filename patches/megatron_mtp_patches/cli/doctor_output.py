"""What `doctor` and `upgrade` print of known defects, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..doctor.findings import Finding
from ..engine import UsageError

FAILS_FROM = 3  # the severity of a defect from which on the command ends with 1


def is_severe(finding: Finding) -> bool:
    return finding.severity >= FAILS_FROM and not finding.is_removed


def exit_code(findings: Iterable[Finding], is_doubtful: object) -> int:
    return 1 if any(map(is_severe, findings)) else UsageError.exit_code if is_doubtful else 0


def show_findings(show: Callable[..., None], findings: Iterable[Finding]) -> None:
    """A line for each, coloured by what is left to do."""
    for finding in findings:
        removed = f"removed by {finding.patch}" + (f"; {finding.remedy}" if finding.remedy else "")
        answer = removed if finding.is_removed else f"NOT REMOVED: {finding.remedy}"
        condition = f", if {finding.only_if}" if finding.only_if else ""
        sure = {"read": "; read in the source", "reported": "; reported by others"}.get(finding.evidence, "")
        text = f"* {finding.id}, severity {finding.severity}: {finding.text}{condition} ({finding.releases}{sure})"
        show(f"{text}: {answer}", None if finding.is_removed else "red" if is_severe(finding) else "yellow")
