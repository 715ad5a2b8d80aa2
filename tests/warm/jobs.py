"""Jobs: the tests of one file that run in one group of forks. As many ranks run at once as keep the processors busy."""

from __future__ import annotations

import math
import os
import selectors
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.common.forks import kill
from scripts.common.process import free_port

from .connection import Forks, LevelFailed, Messages, WarmProcesses
from .levels import LEVELS
from .merge import Reports, add_failure, fail, merge

OTHERS_MAY_TAKE = 10.0  # seconds to end a test that has failed on another rank
RANKS_PER_PROCESSOR = 2  # ranks wait for each other, and for what they start
LAST_LINES = 40  # of what a rank printed
Location = tuple[str, int | None, str]
Need = tuple[str, str, int]  # what a job is made for: file, level and number of ranks


@dataclass
class Rank:
    """What one fork has told of itself."""

    at: str = ""
    since: float = 0.0
    reports: dict[str, Reports] = field(default_factory=dict)
    finished: dict[str, list[str]] = field(default_factory=dict)  # test -> names of the threads that it left behind
    problem: str = ""
    told_all: bool = False  # its pipe has ended
    code: int | None = None


class Job:
    """`tests` of `file`, in this order, on `ranks` forks of the process of `level`.

    A test that fails on one of several ranks, ends its process, never ends or leaves a thread behind costs these
    forks; those that follow get new ones.

    `fork_from` names a level below that one: then each fork climbs from there by itself.
    """

    def __init__(
        self, file: str, level: str, ranks: int, tests: dict[str, Location], fork_from: str | None = None
    ) -> None:
        self.file, self.level, self.size = file, level, ranks
        self.fork_from = min(fork_from or level, level, key=LEVELS.index)
        self.locations = tests
        self.waiting = list(tests)
        self.done: dict[str, Reports] = {}
        self.forks: Forks | None = None
        self.ranks: list[Rank] = []
        self._first_failed = 0.0

    # -- forks ---------------------------------------------------------------------------------------------------

    def start(self, warm: WarmProcesses, request: dict[str, Any], logs: Path, selector: Any) -> None:
        """Fork the ranks for the tests that are waiting."""
        self.logs = Path(tempfile.mkdtemp(dir=logs)) / "rank"
        self.ranks = [Rank(since=time.monotonic()) for _ in range(self.size)]
        self._first_failed = 0.0
        mine = {"file": self.file, "tests": self.waiting, "port": free_port(), "log": str(self.logs)}
        try:
            self.forks = warm.fork(self.fork_from, self.size, {**request, **mine, "inside": self.level})
        except LevelFailed as failed:
            self._fail_all(f"the process of level {self.level!r} cannot be made:\n{failed}")
            return
        for source in (*self.forks.ranks, self.forks.control):
            selector.register(source.descriptor, selectors.EVENT_READ, (self, source))
        for message in self.forks.early:
            self.ranks[message["rank"]].code = message["code"]

    def stop(self, selector: Any) -> None:
        """Kill the ranks that are left."""
        if self.forks is None:
            return
        for pid, rank in zip(self.forks.pids, self.ranks, strict=True):
            kill(pid, group_only=rank.code is not None)
        for source in (*self.forks.ranks, self.forks.control):
            if not source.ended:
                selector.unregister(source.descriptor)
            source.close()
        self.forks = None

    def read(self, source: Messages, selector: Any, config: pytest.Config) -> None:
        """Take in what a rank, or the process that forked it, tells."""
        assert self.forks
        for message in source.read():
            if source is self.forks.control:
                self.ranks[message["rank"]].code = message["code"]
            else:
                self._hear(self.ranks[self.forks.ranks.index(source)], message, config)
        if source.ended:
            selector.unregister(source.descriptor)
            if source is not self.forks.control:
                self.ranks[self.forks.ranks.index(source)].told_all = True

    def _hear(self, rank: Rank, message: dict[str, Any], config: pytest.Config) -> None:
        if "start" in message:
            rank.at, rank.since = message["start"], time.monotonic()
        elif "report" in message:
            report = config.hook.pytest_report_from_serializable(config=config, data=message["report"])
            if report.skipped and isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # as pytest's summary wants it; JSON has no tuples
            rank.reports.setdefault(report.nodeid, []).append(report)
        elif "finish" in message:
            rank.finished[message["finish"]] = message["threads"]
        else:
            rank.problem = message.get("problem") or message.get("skipped") or ""

    # -- tests ---------------------------------------------------------------------------------------------------

    def settle(self, limit: float) -> bool:
        """Take over the tests that have ended; whether the forks are of no more use."""
        while self.waiting and self.forks:
            test = self.waiting[0]
            if all(test in rank.finished for rank in self.ranks):
                if self._take(test):
                    return True
                continue
            problem = self._find_problem(test, limit)
            if problem is None:
                return False
            number, text = problem
            where = f"rank {number}: " if self.size > 1 else ""
            others = "".join(f"\n{self._outcome(n, test)}" for n in range(self.size) if n != number)
            if not any(rank.at for rank in self.ranks):  # it is not this test's doing
                self._fail_all(where + text)
            else:
                self._end(test, fail(test, self.locations[test], where + text + others, self._age(), self._printed()))
            return True
        return True

    def _take(self, test: str) -> bool:
        reports = merge([rank.reports[test] for rank in self.ranks])
        left = {number: rank.finished[test] for number, rank in enumerate(self.ranks) if rank.finished[test]}
        if left:
            told = "; ".join(f"rank {number}: {', '.join(names)}" for number, names in left.items())
            reports = add_failure(reports, f"threads were left behind ({told})")
        self._end(test, reports)
        return bool(left) or (self.size > 1 and any(report.failed for report in reports))

    def _find_problem(self, test: str, limit: float) -> tuple[int, str] | None:
        """Which rank will not finish `test`, and why; None while all may."""
        for number, rank in enumerate(self.ranks):
            # A process that it has started may keep its pipe open: then it has told all when nothing comes.
            if test not in rank.finished and rank.code is not None and (rank.told_all or limit < math.inf):
                if rank.finished and rank.at in rank.finished and rank.code >= 0:
                    return number, "did not find this test when it collected the file again"
                return number, rank.problem or f"{_ended(rank.code)} in {rank.at or 'its collection'}"
        failed = [rank for rank in self.ranks if any(report.failed for report in rank.reports.get(test, ()))]
        self._first_failed = self._first_failed or (time.monotonic() if failed else 0.0)
        slow = next(number for number, rank in enumerate(self.ranks) if test not in rank.finished)
        patience = min(OTHERS_MAY_TAKE, limit)
        if failed and test in failed[0].finished and time.monotonic() - self._first_failed > patience:
            self._dump(slow)
            return slow, f"did not end within {patience:.0f} s of a failure on another rank"
        if self._age() > limit:
            self._dump(slow)
            return slow, f"did not end within {limit:.0f} s"
        return None

    def _outcome(self, number: int, test: str) -> str:
        reports = self.ranks[number].reports.get(test, ())
        failed = [report.longreprtext for report in reports if report.failed]
        if failed:
            return f"rank {number}: {failed[0]}"
        return f"rank {number} {'passed' if test in self.ranks[number].finished else 'had not ended'}"

    def _age(self) -> float:
        return time.monotonic() - max(rank.since for rank in self.ranks)

    def _dump(self, number: int) -> None:
        """Have the rank write where it is; see inside.py."""
        assert self.forks
        try:
            os.kill(self.forks.pids[number], signal.SIGUSR1)
            time.sleep(0.5)
        except ProcessLookupError:
            pass

    def _printed(self) -> dict[int, str]:
        files = [Path(f"{self.logs}.{number}") for number in range(self.size)]
        lines = [file.read_text(errors="replace").splitlines() if file.exists() else [] for file in files]
        return {number: "\n".join(some[-LAST_LINES:]) for number, some in enumerate(lines)}

    def _end(self, test: str, reports: Reports) -> None:
        self.waiting.remove(test)
        self.done[test] = reports

    def _fail_all(self, problem: str) -> None:
        printed = self._printed()
        for test in list(self.waiting):
            self._end(test, fail(test, self.locations[test], problem, 0.0, printed))


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Jobs:
    """Runs jobs ahead of the test that is asked for, as far as processors are free."""

    def __init__(self, warm: WarmProcesses, jobs: list[Job], request: dict[str, Any], config: pytest.Config) -> None:
        self.warm, self.jobs, self.request, self.config = warm, jobs, request, config
        self.at_once = RANKS_PER_PROCESSOR * len(os.sched_getaffinity(0))
        self.limit = float(config.getini("warm_limit"))
        self.of_test = {test: job for job in jobs for test in job.locations}
        self.logs = tempfile.TemporaryDirectory(prefix="warm-logs-")
        self.selector = selectors.DefaultSelector()

    def reports_of(self, test: str) -> Reports:
        """Wait for `test`, which belongs to one of the jobs."""
        job = self.of_test[test]
        while test not in job.done:
            self._start_jobs(job)
            ready = self.selector.select(0.1)
            for key, _ in ready:
                owner, source = key.data
                owner.read(source, self.selector, self.config)
            self._settle(math.inf if ready else self.limit)  # more may have been told while this process was busy
        return job.done.pop(test)

    def poll(self) -> None:
        """Start what can be started, without waiting."""
        self._start_jobs(None)

    def _start_jobs(self, wanted: Job | None) -> None:
        free = self.at_once - sum(job.size for job in self.jobs if job.forks)
        for job in self.jobs:
            if job.waiting and not job.forks and (job is wanted or job.size <= free):
                job.start(self.warm, self.request, Path(self.logs.name), self.selector)
                free -= job.size

    def _settle(self, limit: float) -> None:
        for job in self.jobs:
            if job.forks and job.settle(limit):
                job.stop(self.selector)

    def close(self) -> None:
        for job in self.jobs:
            job.stop(self.selector)
        self.selector.close()
        self.logs.cleanup()
