"""Run test files on N ranks, until each test has an outcome or time is up."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.common import process

from .ranks import Ranks
from .verdicts import Outcomes

# Seconds without a word from any rank after which a process hangs. Several ranks may wait for a collective, which gloo
# gives up after 60 seconds. One rank waits for nobody: it computes, in Triton's interpreter for example.
PATIENCE, PATIENCE_OF_ONE_RANK, PATIENCE_TO_COLLECT = 150.0, 60.0, 300.0
LATE = ("not run", "time was up")
MOST_HANGING = 2  # once so many cases of a test hang, its other cases do not run
LIKE_OTHERS = ("not run", f"{MOST_HANGING} other cases of it hang")
WORST = ("passed", "skipped", "failed", "hung", "crashed")


@dataclass
class Job:
    """Test files of a tree on some ranks.

    Attributes:
        patches: the value of MEGATRON_MTP_PATCHES.
        outcome_file: the path that the ranks write beside, with an ending.
        only: a pattern of the tests that run.
    """

    tree: Path
    files: list[str]
    ranks: int
    device: str
    patches: str
    outcome_file: Path
    only: str = ""
    outcomes: Outcomes = field(default_factory=dict)


def run(job: Job, until: float, resume: bool, advance: Callable[[int], None]) -> Outcomes:
    """Run the tests of `job`: {test: (outcome, cause)}.

    A rank that dies or hangs, and ranks that part, cost the test they were at; the others run on new ranks. They leave
    their outcomes behind, so that a job that is killed can be resumed.

    Args:
        until: a time.monotonic().
        resume: take the outcomes in the job's files, and run only the tests for which there was no time, and those
            named by the job that the files lack.
        advance: is told how many tests have ended.
    """
    job.outcome_file.parent.mkdir(parents=True, exist_ok=True)
    kept = _beside(job, "outcomes.json")
    late: set[str] = set()
    if resume and kept.is_file():
        earlier = json.loads(kept.read_text(encoding="utf-8"))
        late = {test for test, outcome in earlier.items() if tuple(outcome) == LATE}
        late |= {f"tests/unit_tests/{name}" for name in job.files if "::" in name} - earlier.keys()
        if earlier and not late:
            return earlier
        job.outcomes = {test: outcome for test, outcome in earlier.items() if test not in late}
        late = {test for test in late if "::" in test}  # the others are files whose tests were not known yet
    kept.unlink(missing_ok=True)
    _beside(job, "log").unlink(missing_ok=True)
    tests: set[str] = set()  # ranks that end before they have collected anything do not say what they leave out
    with (
        # Not beside that file: a socket in it has a name of 108 characters at most. Each job has its own, because
        # upstream's tests share folders by name.
        tempfile.TemporaryDirectory(prefix="replay-", ignore_cleanup_errors=True) as temporary,
        Ranks(job.ranks, job.device, job.tree, _environment(job, temporary), _beside(job, "log")) as ranks,
    ):
        while job.files:
            before = len(job.outcomes)
            for old in _outcome_files(job):
                old.unlink(missing_ok=True)
            _beside(job, "done").write_text("\n".join(job.outcomes), encoding="utf-8")
            end = _run_once(job, ranks, until, advance)
            collected, finished = _read(job, end)
            tests |= collected
            job.outcomes |= dict.fromkeys(_cases_like_those_that_hang(job.outcomes, tests), LIKE_OTHERS)
            _keep(kept, dict.fromkeys(tests | late, LATE) | job.outcomes)
            if finished or end == "late" or len(job.outcomes) == before:
                break
            job = replace(job, files=_files_of(job, collected))
    for test in (tests | late) - set(job.outcomes):
        job.outcomes[test] = LATE if end == "late" else ("not run", "the process died before it")
    if end == "late" and not tests | late:
        job.outcomes |= {f"tests/unit_tests/{file}": LATE for file in job.files}
    _keep(kept, job.outcomes)
    return job.outcomes


def _keep(file: Path, outcomes: Outcomes) -> None:
    """Write the file in one go: a process that is killed leaves the old outcomes or the new ones."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(outcomes), encoding="utf-8")
    new.replace(file)


def _cases_like_those_that_hang(outcomes: Outcomes, tests: set[str]) -> set[str]:
    """The tests without an outcome that are cases of a test of which MOST_HANGING others hang."""
    hanging = Counter(_function(test) for test, (outcome, _) in outcomes.items() if outcome == "hung")
    return {test for test in tests - set(outcomes) if hanging[_function(test)] >= MOST_HANGING}


def _function(test: str) -> str:
    return test.partition("[")[0]


def _files_of(job: Job, collected: set[str]) -> list[str]:
    """Those with tests that have no outcome yet; where tests were given by name, those tests."""
    if any("::" in name for name in job.files):
        return [name for name in job.files if f"tests/unit_tests/{name}" not in job.outcomes]
    left = {test.partition("::")[0] for test in collected - set(job.outcomes)}
    return [file for file in job.files if f"tests/unit_tests/{file}" in left] or job.files


def _run_once(job: Job, ranks: Ranks, until: float, advance: Callable[[int], None]) -> str:
    """The kind of end, if not all ranks have finished: "late", "hung" or "crashed"."""
    size, heard = -1, time.monotonic()

    def should_stop() -> bool:
        nonlocal size, heard
        files = [path for path in _outcome_files(job) if path.is_file()]
        if sum(path.stat().st_size for path in files) != size:
            size, heard = sum(path.stat().st_size for path in files), time.monotonic()
            advance(len(job.outcomes) + min((path.read_text().count('"ended"') for path in files), default=0))
        patience = PATIENCE_OF_ONE_RANK if job.ranks == 1 else PATIENCE
        silence = time.monotonic() - heard
        return time.monotonic() > until or silence > (patience if size else PATIENCE_TO_COLLECT)

    if ranks.run(_arguments(job), should_stop):
        return "crashed"
    return "late" if time.monotonic() > until else "hung"


def _arguments(job: Job) -> list[str]:
    """The words after pytest."""
    options = ["-p", "scripts.replay.outcomes_plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "-W", "ignore"]
    options += ["-o", "addopts=", "--continue-on-collection-errors", "--rootdir", str(job.tree)]
    return [*options, *(f"tests/unit_tests/{file}" for file in job.files)]


def _environment(job: Job, temporary: str) -> dict[str, str]:
    variables = process.environment(
        job.patches,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        REPLAY_OUTCOMES=str(job.outcome_file),
        REPLAY_DONE=str(_beside(job, "done")),
        REPLAY_ONLY=job.only,
        REPLAY_DEVICE=job.device,
        PYTEST_DEBUG_TEMPROOT=temporary,
        TMPDIR=temporary,
        # upstream's tests of the layer-wise optimizer ask which of NVIDIA's images they run in
        NVIDIA_PYTORCH_VERSION=os.environ.get("NVIDIA_PYTORCH_VERSION", "26.06"),
    )
    return {**variables, "PYTHONPATH": f"{job.tree}{os.pathsep}{variables['PYTHONPATH']}"}


def _outcome_files(job: Job) -> list[Path]:
    return [_beside(job, f"{rank}.jsonl") for rank in range(job.ranks)]


def _beside(job: Job, ending: str) -> Path:
    return Path(f"{job.outcome_file}.{ending}")


def _read(job: Job, end: str) -> tuple[set[str], bool]:
    """Take over what all ranks wrote: the worst of their outcomes. All collected tests; have all ranks finished?"""
    collected: set[str] = set()
    finished = 0
    started: dict[str, int] = {}
    ended: dict[str, list[tuple[str, str]]] = {}
    for path in _outcome_files(job):
        for entry in _entries(path):
            if entry["event"] == "collected":
                collected |= set(entry["tests"])
            elif entry["event"] == "started":
                started[entry["test"]] = started.get(entry["test"], 0) + 1
            elif entry["event"] == "ended":
                ended.setdefault(entry["test"], []).append((entry["outcome"], entry["cause"]))
            else:
                finished += 1
    is_whole = finished == job.ranks
    for test, outcomes in ended.items():
        if is_whole or len(outcomes) == job.ranks or max(outcomes, key=_gravity)[0] == "failed":
            job.outcomes[test] = max(outcomes, key=_gravity)
    if not is_whole and end != "late":
        for test in set(started) - set(job.outcomes):
            job.outcomes[test] = ("hung", "a rank waited in vain") if test in ended else (end, f"the process {end}")
    return collected, is_whole


def _gravity(outcome: tuple[str, str]) -> tuple[int, bool]:
    """A rank's own failure says more than that another one went away."""
    return WORST.index(outcome[0]), not re.search("[Cc]onnection|[Tt]imed out", outcome[1])


def _entries(path: Path) -> Iterable[dict]:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the process died while it wrote
                return
