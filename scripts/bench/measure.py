"""What scripts/bench.py measures: each function gives rows for the tables; `tell` hears of each turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pythons import REFERENCE
from ratios import Rounds, Side, acceptance_row, import_row, slowest, step_row
from step import CASES
from workers import LAST, Worker, environment, run

IMPORTS = 15
COUNTED = 2  # steps
IMPORT = (
    "import sys, time; start = time.process_time(); import megatron_mtp_patches; "
    "print(1e3 * (time.process_time() - start), 'torch' in sys.modules)"
)


def steps(
    release: str,
    python: str,
    native: str | None,
    ranks: int,
    device: str,
    parameters: int,
    rounds: int,
    length: int,
    logs: Path,
    tell: Callable[[str], None],
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """(versions, rows). The release without and with the patches and `native`, a Python, take turns."""
    keys = {(release, False): python, (release, True): python}
    if native:
        keys[REFERENCE, False] = native
    workers = {key: Worker(path, ranks, device, key[1], parameters, logs) for key, path in keys.items()}
    try:
        for (name, _), worker in workers.items():
            worker.wait_until_ready()
            found = worker.about["megatron-core"]
            if name[0].isdigit() and found != name:
                sys.exit(f"{worker.name} has megatron-core {found}, not {name}")
        rows = []
        for case in CASES:
            taken: dict[tuple[str, bool], Rounds] = {key: [] for key in workers}
            for number in range(rounds):
                tell(f"{release}, {ranks} rank{'s' * (ranks > 1)}, {case}: round {number + 1}")
                for key, worker in workers.items():
                    taken[key].append(slowest(worker.ask(case=case, time=length)))
            sides = {key: Side(taken[key], worker.ask(case=case, count=COUNTED)[0]) for key, worker in workers.items()}
            plain, patched = sides[release, False], sides[release, True]
            rows.append(step_row(case, ranks, release, plain, patched, sides.get((REFERENCE, False))))
        return workers[release, True].about, rows
    finally:
        for worker in workers.values():
            worker.close()


def imports(release: str, python: str) -> dict[str, Any]:
    """CPU time of `import megatron_mtp_patches` in fresh interpreters, its bytecode there."""
    found = []
    for _ in range(1 + IMPORTS):
        done = subprocess.run([python, "-c", IMPORT], env=environment("all"), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr[-LAST:]}\n{python} cannot import megatron_mtp_patches, see above")
        found.append(done.stdout.split())
    return import_row(release, [float(taken) for taken, _ in found[1:]], any(loaded == "True" for _, loaded in found))


def acceptance(release: str, python: str, device: str, tokens: int, vocabulary: int, folder: Path) -> dict[str, Any]:
    file = folder / "acceptance.json"
    command = run(python, device, "acceptance.py", str(file), "--tokens", str(tokens), "--vocabulary", str(vocabulary))
    done = subprocess.run(command, env=environment("all"), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{(done.stdout + done.stderr)[-LAST:]}\n{' '.join(command)} failed, see above")
    return acceptance_row(release, json.loads(file.read_text()), device)
