"""Run the standalone files of the known defects that one rank can show, as a person would who reports one.

    python -m scripts.gpu.reproductions RESULT [HOW MANY]

Each file is a process without this package. RESULT is written after each one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from megatron_mtp_patches.cli.reproduce import write_standalone
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.reproductions import needs, runner
from megatron_mtp_patches.reproductions.standalone import needs_gpus

from scripts.common.process import ROOT

LIMIT = 60  # seconds of a file
STATES = {0: "not seen", 1: "seen", 125: "cannot run"}  # by exit code


def main() -> int:
    file, *many = sys.argv[1:]
    chosen = [defect.id for defect in known_defects() if can_run(defect)][: int(*many) if many else None]
    outcomes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        for future in as_completed([pool.submit(run_standalone, one, Path(folder)) for one in chosen]):
            outcomes |= future.result()
            Path(file).write_text(json.dumps(outcomes), encoding="utf-8")
    return int(any(outcome["state"] != "seen" for outcome in outcomes.values()))


def can_run(defect: Any) -> bool:
    """True if this Megatron has it, and one rank of this machine can show it."""
    program = runner.find_program(defect.id)
    if program is None or getattr(program, "RANKS", 1) > 1 or has_defect(defect) is False:
        return False
    return not needs.find_missing(program) and (torch.cuda.device_count() > 0 or not needs_gpus(program))


def run_standalone(identifier: str, folder: Path) -> dict[str, dict[str, str]]:
    script = folder / f"{identifier.lower().replace('-', '_')}.py"
    with contextlib.redirect_stdout(io.StringIO()):
        write_standalone(identifier, script)
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": without_this_package()},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {identifier: {"state": f"not ended after {LIMIT} s", "said": ""}}
    state = STATES.get(done.returncode, f"exit code {done.returncode}")
    if "Traceback" in done.stderr and not hasattr(runner.find_program(identifier), "EXPECTED"):
        state = "an error, which is not what the defect is"
    said = done.stdout.splitlines()[-2:] or done.stderr.splitlines()[-1:]
    return {identifier: {"state": state, "said": "; ".join(" ".join(line.split()) for line in said)}}


def without_this_package() -> str:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if not Path(path).is_relative_to(ROOT) or ".gpu" in Path(path).parts)


if __name__ == "__main__":
    sys.exit(main())
