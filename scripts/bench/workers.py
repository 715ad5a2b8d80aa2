"""The processes of one Megatron, patched or not, a rank each. They wait while those of others are measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.common.process import environment, free_port, rank_variables

ANSWER = "bench: "  # begins each line that a worker answers with
CASES = {  # the type of the parameters, and whether some are in a norm group
    "fp32": ("float32", False),
    "fp32, norm groups": ("float32", True),
    "bf16": ("bfloat16", False),
    "bf16, norm groups": ("bfloat16", True),
}


class Worker:
    def __init__(
        self, release: str, python: str, patches: str, ranks: int, options: argparse.Namespace, logs: Path
    ) -> None:
        self.release = release
        self.name = f"{release} with patches {patches}"
        self.about: dict[str, str] = {}
        port = free_port()
        device = "cuda" if options.device == "gpu" else "cpu"
        words = [python, "-W", "ignore", "-m", "megatron_mtp_patches", "run", "--device", device]
        words += [str(Path(__file__).with_name("step_worker.py")), options.device, str(options.parameters)]
        self.logs = [logs / f"{id(self)}-{rank}.log" for rank in range(ranks)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as errors:
                process = subprocess.Popen(
                    words,
                    env=environment(patches, **rank_variables(rank, ranks, port)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                )
            self.ranks.append(process)

    def wait_until_ready(self) -> None:
        self.about = self._answers()[0]
        found = self.about["megatron-core"]
        if self.release[0].isdigit() and found != self.release:
            sys.exit(f"the Python of {self.release} has megatron-core {found}")

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
                sys.exit(f"{log.read_text(errors='replace')[-3000:]}\nthe process of {self.name} has ended{killed}")
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
