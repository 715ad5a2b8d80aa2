"""Time optimizer.step of thousands of parameters, unpatched and patched on each release and native on 0.19.2.

    python -m scripts.bench step --python 0.18.2=PYTHON --python 0.19.2=PYTHON [--ranks 1,2] [--out ci/bench]

The Megatrons take turns of one step each, and their processes are started several times. On 0.19.2 unpatched and native
are the same Megatron, started twice: what they differ by is noise. Counts the all-reduces, host-device syncs and, on a
GPU, kernel launches of a step, too. A row that misses its target says so. Needs torch and megatron-core in each Python,
and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from megatron_mtp_patches.megatrons import REFERENCE

from scripts.common.arguments import numbers, positive

from . import record
from .ratios import Side, step_row
from .workers import CASES, Worker

COUNTED = 2  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record.add_arguments(parser)
    parser.add_argument("--ranks", type=numbers, default=[1], help="numbers of ranks (default: 1)")
    parser.add_argument("--parameters", type=positive, default=2000, help="how many the optimizer has (default: 2000)")
    parser.add_argument("--starts", type=positive, default=3, help="of all processes (default: 3)")
    parser.add_argument("--turns", type=positive, default=50, help="steps of each Megatron in a start (default: 50)")


def run(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    rows, versions = [], {}
    with Progress() as progress, tempfile.TemporaryDirectory() as logs:
        starts = len(options.ranks) * len(options.python) * options.starts
        bar = progress.add_task("", total=starts * len(CASES))
        for ranks in options.ranks:
            for release in options.python:

                def tell(text: str, where: str = f"{release}, {ranks} rank{'s' * (ranks > 1)}") -> None:
                    progress.update(bar, description=f"{where}, {text}", advance=1)

                versions[release], found = measure(release, ranks, options, Path(logs), tell)
                rows += found
    record.report("step", rows, options, versions)


def measure(
    release: str, ranks: int, options: argparse.Namespace, logs: Path, tell: Any
) -> tuple[dict[str, str], list[record.Row]]:
    """Return (versions, rows) of a release without and with the patches and of the native one, if --python has that.

    `tell` hears of each start. Where the release is the native one it is started twice without the patches.
    """
    releases = {"unpatched": release, "patched": release}
    if REFERENCE in options.python:
        releases["native"] = REFERENCE
    seconds: dict[str, dict[str, list[list[float]]]] = {case: {side: [] for side in releases} for case in CASES}
    counts: dict[str, dict[str, Any]] = {case: {} for case in CASES}
    shuffled = random.Random(1)
    for start in range(options.starts):
        workers: dict[str, Worker] = {}
        try:
            for side, wanted in releases.items():
                patches = "all" if side == "patched" else "none"
                workers[side] = Worker(wanted, options.python[wanted], patches, ranks, options, logs)
            for worker in workers.values():
                worker.wait_until_ready()
            for case in CASES:
                tell(f"{case}: start {start + 1}")
                for found in seconds[case].values():
                    found.append([])
                for _ in range(options.turns):
                    for side in shuffled.sample(list(workers), len(workers)):
                        # a step ends with its last rank
                        seconds[case][side][-1].append(max(workers[side].ask(case=case)))
                if not counts[case]:
                    counts[case] = {side: worker.ask(case=case, count=COUNTED)[0] for side, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
    sides = {case: {side: Side(seconds[case][side], counts[case][side]) for side in releases} for case in CASES}
    return workers["patched"].about, [step_row(case, ranks, release, **sides[case]) for case in CASES]
