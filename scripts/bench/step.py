"""Time optimizer.step of thousands of parameters, unpatched and patched on each release and native on 0.19.2.

    python -m scripts.bench step --python 0.18.2=PYTHON --python 0.19.2=PYTHON [--ranks 1,2] [--out ci/bench]

The Megatrons take turns of one step each, and their processes are started several times. On 0.19.2 unpatched and native
are the same Megatron, started twice: what they differ by is noise. Counts the all-reduces, host-device syncs and, on a
GPU, kernel launches of a step, too. A row that misses its target says so. With --out, rows are written as they come;
those of other releases and numbers of ranks stay. Needs torch and megatron-core in each Python, on a CPU without
TransformerEngine (the rehearsal's stand-ins for its kernels would be timed), and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_mtp_patches.megatrons.known import REFERENCE

from scripts import study
from scripts.common.arguments import numbers, positive
from scripts.common.process import end, environment

from . import results
from .ratios import Side, step_row

COUNTED = 2  # steps
ANSWER = "bench: "  # begins each line that a worker answers with
CASES = {  # the type of the parameters, and whether some are in a norm group
    "fp32": ("float32", False),
    "fp32, norm groups": ("float32", True),
    "bf16": ("bfloat16", False),
    "bf16, norm groups": ("bfloat16", True),
}


class Worker:
    """The ranks of one Megatron, patched or not, which run step_worker.py. They wait while others are measured."""

    def __init__(self, release: str, patches: str, ranks: int, options: argparse.Namespace, log: Path) -> None:
        self.log = log
        python, device = options.python[release], "cuda" if options.device == "gpu" else "cpu"
        script = Path(__file__).with_name("step_worker.py")
        words = ["run", "--device", device, script, options.device, options.parameters]
        command = [*study.launcher(python, ranks), "-m", "megatron_mtp_patches", *map(str, words)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "errors": "replace"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment(patches), stderr=errors, start_new_session=True, **pipes
            )

    def ask(self, **order: Any) -> Any:
        with suppress(BrokenPipeError):  # it has ended, and so has its answer
            print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        line = next((line for line in self.process.stdout or () if line.startswith(ANSWER)), None)
        if line is None:
            sys.exit(f"{self.log.read_text(errors='replace')[-3000:]}\na process of {self.log.stem} has ended")
        return json.loads(line.removeprefix(ANSWER))

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.communicate(timeout=30)
        if self.process.poll() is None:
            end(self.process)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    results.add_arguments(parser)
    parser.add_argument("--ranks", type=numbers, default=[1], help="numbers of ranks (default: 1)")
    parser.add_argument("--parameters", type=positive, default=2000, help="how many the optimizer has (default: 2000)")
    parser.add_argument("--starts", type=positive, default=3, help="of all processes (default: 3)")
    parser.add_argument("--turns", type=positive, default=50, help="steps of each Megatron in a start (default: 50)")


def run(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    rows = []
    with Progress() as progress:
        starts = len(options.ranks) * len(options.python) * options.starts
        bar = progress.add_task("", total=starts * len(CASES))
        for ranks in options.ranks:
            for release in options.python:

                def tell(text: str, where: str = f"{release}, {study.count_ranks(ranks)}") -> None:
                    progress.update(bar, description=f"{where}, {text}", advance=1)

                for versions, row in measure(release, ranks, options, tell):
                    results.write("step", [row], options, {release: versions})
                    rows.append(row)
    results.show("step", rows)


def measure(
    release: str, ranks: int, options: argparse.Namespace, tell: Any
) -> Iterator[tuple[dict[str, str], results.Row]]:
    """Yield (versions, row) of each case: a release without and with the patches, and the native one in --python.

    `tell` hears of each start. Where the release is the native one it is started twice without the patches.
    """
    releases = {"unpatched": release, "patched": release}
    if REFERENCE in options.python:
        releases["native"] = REFERENCE
    shuffled = random.Random(1)
    sides = {case: {side: Side([], {}) for side in releases} for case in CASES}
    for start in range(1, options.starts + 1):
        workers: dict[str, Worker] = {}
        with tempfile.TemporaryDirectory() as logs:
            try:
                for side, version in releases.items():
                    patches = "all" if side == "patched" else "none"
                    workers[side] = Worker(version, patches, ranks, options, Path(logs, f"{version} {side}.log"))
                versions = {side: worker.answer() for side, worker in workers.items()}
                for side, version in releases.items():
                    study.check_release(version, versions[side]["megatron-core"])
                for case in CASES:
                    tell(f"{case}: start {start}")
                    for side in releases:
                        sides[case][side].starts.append([])
                    for _ in range(options.turns):
                        for side in shuffled.sample(list(workers), len(workers)):
                            sides[case][side].starts[-1].append(workers[side].ask(case=case))
                    if start == 1:
                        for side, worker in workers.items():
                            sides[case][side].counts.update(worker.ask(case=case, count=COUNTED))
                    if start == options.starts:
                        row = step_row(case, ranks, release, options.parameters, **sides[case])
                        yield versions["patched"], row
            finally:
                for worker in workers.values():
                    worker.close()
