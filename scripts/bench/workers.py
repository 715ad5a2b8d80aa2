"""Processes of step.py: one Megatron, patched or not, on one or more ranks. They wait while others are measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from step import ANSWER

ROOT = Path(__file__).resolve().parents[2]
LAST = 3000  # characters of a log


def environment(patches: str) -> dict[str, str]:
    """Of a process that runs Megatron from this tree."""
    paths = [str(ROOT / "patches"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MEGATRON_MTP_PATCHES": patches,
        "OMP_NUM_THREADS": "1",
    }


def run(python: str, device: str, script: str, *arguments: str) -> list[str]:
    """The command that runs `script` of this folder under the patches."""
    launcher = [python, "-W", "ignore", "-m", "megatron_mtp_patches", "run"]
    device = "cuda" if device == "gpu" else device
    return [*launcher, "--device", device, str(Path(__file__).with_name(script)), *arguments]


class Worker:
    def __init__(self, side: str, python: str, ranks: int, device: str, parameters: int, logs: Path) -> None:
        """`side`: "patched", or another name for one without the patches."""
        self.name = f"{side} {python}"
        self.about: dict[str, str] = {}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        command = run(python, device, "step.py", "--parameters", str(parameters), "--device", device)
        self.logs = [logs / f"{id(self)}-{rank}.log" for rank in range(ranks)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            with log.open("w") as errors:
                process = subprocess.Popen(
                    command,
                    env={**environment("all" if side == "patched" else "none"), **place},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                )
            self.ranks.append(process)

    def wait_until_ready(self) -> None:
        self.about = self._answers()[0]

    def ask(self, **order: Any) -> list[Any]:
        """What each rank answers."""
        for process in self.ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, and so has its answer
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for process, log in zip(self.ranks, self.logs, strict=True):
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(ANSWER)), None)
            if line is None:
                self.close()
                killed = " (killed; where memory runs out, ask for fewer --ranks)" if process.returncode == -9 else ""
                text = log.read_text(errors="replace")[-LAST:]
                sys.exit(f"{text}\nthe process of {self.name} has ended, see above{killed}")
            found.append(json.loads(line.removeprefix(ANSWER)))
        return found

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
