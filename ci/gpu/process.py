"""One command within a limit of time, its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

GRACE = 10.0  # seconds to end well


def run(command: list[str], environment: dict[str, str], log: Path, limit: float) -> int | None:
    """Its exit code; None if it ran past `limit` seconds."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end(process)


def end(process: subprocess.Popen) -> None:
    """With all that it has started: launchers give each of their processes a session of its own."""
    family = [process.pid, *descendants(process.pid)]
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            try:
                os.kill(pid, signal_)
            except ProcessLookupError:
                pass
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def descendants(pid: int) -> list[int]:
    """Of what Linux says of the processes there are."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]
