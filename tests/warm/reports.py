"""One report of a test from those of its ranks, and reports of a test that could not report itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

Reports = list[pytest.TestReport]  # of setup, call and teardown


def first_failure(reports: Reports) -> pytest.TestReport | None:
    return next((report for report in reports if report.failed), None)


def merge(by_rank: Sequence[Reports]) -> Reports:
    """The reports of the first rank on which the test failed, which name it; those of rank 0 where none did."""
    failures = {rank: failure for rank, reports in enumerate(by_rank) if (failure := first_failure(reports))}
    outcomes = [[(report.when, report.outcome) for report in reports] for reports in by_rank]
    if failures and len(by_rank) > 1:
        rank, chosen = next(iter(failures.items()))
        crash = getattr(chosen.longrepr, "reprcrash", None)
        if crash:
            crash.message = f"rank {rank}: {crash.message}"
            chosen.longrepr.addsection("rank", f"This is rank {rank}.")
        else:
            chosen.longrepr = f"rank {rank}: {chosen.longreprtext}"
        chosen.sections += [(f"rank {other}", failures[other].longreprtext) for other in failures if other != rank]
        return by_rank[rank]
    if any(outcome != outcomes[0] for outcome in outcomes):
        ends = ("skipped" if any(report.skipped for report in reports) else "passed" for reports in by_rank)
        problem = f"ranks differ: {', '.join(f'rank {rank} {end}' for rank, end in enumerate(ends))}"
        return fail(by_rank[0][0].nodeid, by_rank[0][0].location, problem)
    return by_rank[0]


def fail(
    nodeid: str, location: tuple[str, int | None, str], problem: str, sections: Sequence[tuple[str, str]] = ()
) -> Reports:
    """The reports of a test that failed with this problem, though no process could report it."""

    def report(when: str, outcome: str = "passed", longrepr: str | None = None) -> pytest.TestReport:
        return pytest.TestReport(nodeid, location, {}, outcome, longrepr, when)  # type: ignore[arg-type]

    reports = [report("setup"), report("call", "failed", problem), report("teardown")]
    reports[1].sections = list(sections)
    return reports
