"""A pytest plugin that writes the outcome of each test as a line, so that a process that dies loses nothing.

REPLAY_OUTCOMES names the file (each rank adds its number), REPLAY_DONE a file of test ids to leave out. REPLAY_ONLY is
a pattern of the tests that run. REPLAY_DEVICE is cpu (everything runs in a rehearsal) or gpu. MEGATRON_MTP_PATCHES
decides what is patched.

If ranks part in a test (one fails where another passes or waits), they are out of step in every later collective. Then
all ranks end, and jobs.py starts new ones.
"""

from __future__ import annotations

import json
import os
import re
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from . import absent
from .verdicts import all_ranks_say

if os.environ["REPLAY_DEVICE"] == "cpu":
    import megatron_mtp_patches.rehearsal.pytest_plugin
else:
    import megatron_mtp_patches  # noqa: F401

absent.install(Path.cwd() / "tests")
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files
_RANK = os.environ.get("RANK", "0")
_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
_FILE = Path(f"{os.environ['REPLAY_OUTCOMES']}.{_RANK}.jsonl")
FAILED_FOR = timedelta(seconds=3)  # for so long a rank that failed waits for the others, which may wait for it
ENDED_FOR = timedelta(seconds=150)  # and for so long one that did not fail


def _launcher_store() -> Any:
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("replay", dist.TCPStore(address, port, is_master=False))


_STORE = _launcher_store() if _RANKS > 1 else None


def _write(**entry: Any) -> None:
    with _FILE.open("a", encoding="utf-8") as outcomes:
        outcomes.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    done = set(Path(os.environ["REPLAY_DONE"]).read_text(encoding="utf-8").splitlines())
    only = re.compile(os.environ["REPLAY_ONLY"])
    items[:] = [item for item in items if item.nodeid not in done and only.search(item.nodeid.partition("::")[2])]
    _write(event="collected", tests=[item.nodeid for item in items])


def pytest_collectreport(report: Any) -> None:
    if report.failed or report.skipped:
        _write(event="ended", test=report.nodeid, outcome=report.outcome, cause=_cause(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="started", test=nodeid)


_reports: list = []


def pytest_runtest_logreport(report: Any) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    bad = [report for report in _reports if not report.passed]
    worst = next((report for report in bad if report.failed), bad[0] if bad else None)
    outcome = worst.outcome if worst else "passed"
    cause = _cause(worst) if worst else ""
    _write(event="ended", test=nodeid, outcome=outcome, cause=cause)
    _reports.clear()
    if _STORE:
        patience = FAILED_FOR if outcome == "failed" else ENDED_FOR
        keys = [f"{nodeid} {rank}" for rank in range(_RANKS)]
        if not all_ranks_say(_STORE, keys, int(_RANK), f"{outcome} {re.sub('[0-9]+', '', cause)}", patience):
            os._exit(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any) -> None:
    session.exitstatus = 0  # a launcher kills the other ranks when one ends with anything else
    _write(event="finished")


def _cause(report: Any) -> str:
    """Return one line: the exception, or why the test was skipped."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")[:300]
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash else str(longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    if not crash:  # a file that cannot be collected: the last line says it
        lines.reverse()
    line = lines[0].removeprefix("E ").strip() if lines else ""
    for folder in (Path.cwd(), os.environ["TMPDIR"]):
        line = line.replace(f"{folder}/", "")
    return line[:300]
