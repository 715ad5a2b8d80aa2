"""What scripts/bench.py measures: each function gives rows for the tables; `tell` hears of each start."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pythons import REFERENCE
from ratios import Side, acceptance_row, import_row, step_row
from step import CASES
from workers import LAST, Worker, environment, run

IMPORTS = 15
APPLIES = 10
COUNTED = 2  # steps
IMPORT = (
    "import sys, time; start = time.process_time(); import megatron_mtp_patches; "
    "print(1e3 * (time.process_time() - start), 'torch' in sys.modules)"
)

# In a process in which all of Megatron that the patches touch is imported, as in a training script.
APPLY = """
import contextlib, importlib, time, warnings
import torch, megatron_mtp_patches
warnings.simplefilter("ignore")
megatron_mtp_patches.revert()
for module in megatron_mtp_patches._engine.modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
start = time.process_time()
megatron_mtp_patches.apply("all")
print(time.process_time() - start)
"""


def steps(
    release: str,
    python: str,
    native: str | None,
    ranks: int,
    device: str,
    parameters: int,
    starts: int,
    turns: int,
    logs: Path,
    tell: Callable[[str], None],
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """(versions, rows). The release without and with the patches and `native`, a Python, take turns of a step each.

    Where the release is the native one it is started twice without them: what the two differ by is the machine's.
    """
    pythons = {"unpatched": (release, python), "patched": (release, python)}
    if native:
        pythons["native"] = (REFERENCE, native)
    taken: dict[str, dict[str, list[list[float]]]] = {case: {side: [] for side in pythons} for case in CASES}
    counts: dict[str, dict[str, Any]] = {case: {} for case in CASES}
    shuffled = random.Random(1)
    for start in range(starts):
        workers = {side: Worker(side, path, ranks, device, parameters, logs) for side, (_, path) in pythons.items()}
        try:
            for side, worker in workers.items():
                _wait_for(worker, pythons[side][0])
            for case in CASES:
                tell(f"{release}, {ranks} rank{'s' * (ranks > 1)}, {case}: start {start + 1}")
                for seconds in taken[case].values():
                    seconds.append([])
                for _ in range(turns):
                    for side in shuffled.sample(list(workers), len(workers)):
                        # a step ends with its last rank
                        taken[case][side][-1].append(max(workers[side].ask(case=case)))
                if not counts[case]:
                    counts[case] = {side: worker.ask(case=case, count=COUNTED)[0] for side, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
    rows = []
    for case in CASES:
        sides = {side: Side(taken[case][side], counts[case][side]) for side in pythons}
        rows.append(step_row(case, ranks, release, **sides))
    return workers["patched"].about, rows


def _wait_for(worker: Worker, release: str) -> None:
    worker.wait_until_ready()
    found = worker.about["megatron-core"]
    if release[0].isdigit() and found != release:
        sys.exit(f"{worker.name} has megatron-core {found}, not {release}")


def imports(release: str, python: str) -> dict[str, Any]:
    """CPU time of `import megatron_mtp_patches`, and of apply() once Megatron is imported, in fresh interpreters."""
    found = _run_in_fresh(python, IMPORT, "all", IMPORTS)
    applying = [float(taken) for (taken,) in _run_in_fresh(python, APPLY, "none", APPLIES)]
    loaded_torch = any(loaded == "True" for _, loaded in found)
    return import_row(release, [float(taken) for taken, _ in found], loaded_torch, applying)


def _run_in_fresh(python: str, code: str, patches: str, times: int) -> list[list[str]]:
    """What `code` prints last in each process, its bytecode there: it is written by one more that comes first."""
    variables = environment(patches)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    found = []
    for _ in range(1 + times):
        done = subprocess.run([python, "-W", "ignore", "-c", code], env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr[-LAST:]}\n{python} cannot import or apply megatron_mtp_patches, see above")
        found.append(done.stdout.splitlines()[-1].split())
    return found[1:]


def acceptance(release: str, python: str, device: str, tokens: int, vocabulary: int, folder: Path) -> dict[str, Any]:
    file = folder / "acceptance.json"
    command = run(python, device, "acceptance.py", str(file), "--tokens", str(tokens), "--vocabulary", str(vocabulary))
    done = subprocess.run(command, env=environment("all"), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{(done.stdout + done.stderr)[-LAST:]}\n{' '.join(command)} failed, see above")
    return acceptance_row(release, json.loads(file.read_text()), device)
