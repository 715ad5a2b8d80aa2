"""One release, in warm processes: runs test files against a mutant, until a test fails."""

from __future__ import annotations

import json
import selectors
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.warm.connection import Forks, WarmProcesses  # noqa: E402
from tests.warm.levels import declared_level  # noqa: E402
from tests.warm.processes import free_port, kill  # noqa: E402

from .mutants import Mutant  # noqa: E402
from .suites import Stage  # noqa: E402

LEVEL = "megatron"  # the last at which no override is imported
PATH = [str(ROOT / folder) for folder in ("patches", "scripts", "tests/stand_ins", "scripts/bench")]


class Release:
    """A release's Python, and the edits that do something there."""

    def __init__(self, python: str) -> None:
        self.warm = WarmProcesses(PATH, python)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "effective")
            forks = self._fork(1, Path(folder, "log"), {"before": [["mutation.change:tell_effective", str(file)]]})
            while not forks.control.ended:
                forks.control.read()
            if not file.exists():
                raise SystemExit(f"{python}: {Path(folder, 'log.0').read_text()[-2000:]}")
            self.effective = {(patch, position) for patch, position in json.loads(file.read_text())}

    def matters(self, mutant: Mutant) -> bool:
        """Whether what the mutant changes is in use in this release."""
        return not mutant.dropped or not self.effective.isdisjoint(mutant.dropped)

    def run(self, mutant: Mutant | None, stage: Stage, limit: float) -> dict[str, Any]:
        """{killed: the first failing test or what else ended the run, None if all pass; seconds}"""
        start = time.monotonic()
        changed = mutant.as_change() if mutant else {"dropped": [], "module": ""}
        for file, tests in stage.by_file().items():
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log")
                request = {
                    "before": [["mutation.change:change", changed]],
                    "file": str(ROOT / file),
                    "tests": tests or "all",
                    "inside": declared_level(ROOT / file),
                }
                killed, ran = _listen(self._fork(stage.ranks, log, request), log, limit)
            if tests and not ran:
                raise SystemExit(f"there is no test {', '.join(tests)} on {stage.ranks} ranks")
            if killed:
                return {"killed": killed, "seconds": round(time.monotonic() - start, 1)}
        return {"killed": None, "seconds": round(time.monotonic() - start, 1)}

    def _fork(self, ranks: int, log: Path, request: dict[str, Any]) -> Forks:
        always = {"folder": str(ROOT), "words": ["-x", "--tb=no"], "options": {}, "file": "", "port": free_port()}
        return self.warm.fork(LEVEL, ranks, {**always, "log": str(log), **request})

    def close(self) -> None:
        self.warm.close()


def _listen(forks: Forks, log: Path, limit: float) -> tuple[str | None, bool]:
    """(what ended the run, or None if every rank passed all its tests; whether a test ran). The forks are gone then."""
    until = time.monotonic() + limit
    codes = {message["rank"]: message["code"] for message in forks.early}
    at, ran = "", False
    try:
        with selectors.DefaultSelector() as selector:
            for source in (*forks.ranks, forks.control):
                selector.register(source.descriptor, selectors.EVENT_READ, source)
            while len(codes) < len(forks.pids) or not forks.control.ended:
                ready = selector.select(1.0)
                if time.monotonic() > until:
                    return f"{at}: timeout", ran
                for key, _ in ready:
                    source = key.data
                    for message in source.read():
                        at = message.get("start", at)
                        ran = ran or "report" in message
                        report = message.get("report")
                        if report and report["outcome"] == "failed":
                            return report["nodeid"], True
                        if "problem" in message:
                            return message["in"], True  # it cannot be collected
                        if source is forks.control:
                            codes[message["rank"]] = message["code"]
                    if source.ended:
                        selector.unregister(source.descriptor)
        bad = [rank for rank, code in sorted(codes.items()) if code not in (0, 5)]  # 5: pytest ran no test
        if bad:
            lines = Path(f"{log}.{bad[0]}").read_text(errors="replace").splitlines()
            return f"{at}: exit {codes[bad[0]]}: {' '.join(lines[-3:])[-300:]}", True
        return None, ran
    finally:
        for pid in forks.pids:
            kill(pid, group_only=len(codes) == len(forks.pids))
        for source in (*forks.ranks, forks.control):
            source.close()
