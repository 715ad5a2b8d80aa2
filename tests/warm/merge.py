"""One report of a test from those of its ranks, and reports of tests that could not report themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

PHASES = ("setup", "call", "teardown")
Reports = list[pytest.TestReport]


def merge(by_rank: Sequence[Reports]) -> Reports:
    """The reports of the phases of a test; a phase that failed on any rank has failed, and names that rank."""
    if len(by_rank) == 1:
        return by_rank[0]
    phases = {when: {} for when in PHASES}
    for rank, reports in enumerate(by_rank):
        for report in reports:
            phases[report.when][rank] = report
    return [_merge_phase(ranks) for ranks in phases.values() if ranks]


def _merge_phase(ranks: dict[int, pytest.TestReport]) -> pytest.TestReport:
    failed = [rank for rank, report in ranks.items() if report.failed]
    chosen = ranks[failed[0] if failed else min(ranks)]
    if failed:
        _name_rank(chosen, failed[0])
        others = {rank: report for rank, report in ranks.items() if report is not chosen and report.failed}
        chosen.sections += [(f"rank {rank}", report.longreprtext) for rank, report in others.items()]
    elif len({report.outcome for report in ranks.values()}) > 1:
        outcomes = ", ".join(f"rank {rank} {report.outcome}" for rank, report in sorted(ranks.items()))
        chosen.outcome, chosen.longrepr = "failed", f"ranks differ: {outcomes}"
    chosen.duration = max(report.duration for report in ranks.values())
    return chosen


def _name_rank(report: pytest.TestReport, rank: int) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        report.longrepr = f"rank {rank}: {report.longreprtext}"
        return
    crash.message = f"rank {rank}: {crash.message}"
    report.longrepr.addsection("rank", f"This is rank {rank}.")


def fail(nodeid: str, location: Any, problem: str, seconds: float, logs: dict[int, str]) -> Reports:
    """The reports of a test that ended its process, or never ended; `logs` has what each rank printed."""

    def report(when: str, outcome: str, longrepr: str | None) -> pytest.TestReport:
        return pytest.TestReport(nodeid, tuple(location), {}, outcome, longrepr, when, duration=0.0)  # type: ignore[arg-type]

    call = report("call", "failed", problem)
    call.duration = seconds
    call.sections = [(f"printed by rank {rank}", log) for rank, log in logs.items() if log]
    return [report("setup", "passed", None), call, report("teardown", "passed", None)]


def add_failure(reports: Reports, problem: str) -> Reports:
    """The same, with a teardown that failed."""
    reports[-1].outcome = "failed"
    reports[-1].longrepr = "\n".join(filter(None, [reports[-1].longreprtext, problem]))
    return reports
