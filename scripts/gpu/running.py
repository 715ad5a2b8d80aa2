"""Run stages one after the other. Each has a limit, and none takes another along.

OUT/COMMAND.json and OUT/COMMAND.log are written after each stage, so that whatever ends this process leaves what was
measured before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.process import ROOT, environment, run

from .machine import PACKAGES, Installed, MachineError, install, lacking, name_machine
from .stages import COMMANDS, Stage

WORK = ROOT / ".gpu" / "work"
LEAST = 10  # seconds that a stage gets, or it is left out
LOG_OF_A_STAGE = 2**19  # bytes, the last of them
VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",  # there may be no other interface
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the stages have
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONWARNINGS": "ignore",
}
PASSED = "passed"


def run_command(options: argparse.Namespace) -> int:
    """Run the stages of `options.command`; whether one has not passed.

    Raises:
        MachineError: this machine cannot run any stage, or DIR is not what `pack` writes.
    """
    start = time.monotonic()
    command = COMMANDS[options.command]
    until = start + (options.seconds or command.seconds)
    if missing := lacking():
        raise MachineError(f"this Python lacks {', '.join(missing)}: install them with pip (docs/gpu.md)")
    machine = name_machine(options.device)
    if options.out.is_file():
        raise MachineError(f"{options.out} is a file: give a folder for the results")
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(options.out / f"{options.command}.json", machine)
    installed = install(options.folder.resolve(), WORK)
    outcomes.add("install", state=PASSED, seconds=round(time.monotonic() - start, 1), versions=versions(installed))
    (WORK / "results").mkdir()
    for stage in command.stages(installed, options.device, WORK):
        run_stage(stage, until, outcomes)
    return int(any(outcome["state"] != PASSED for outcome in outcomes.stages.values()))


def versions(installed: Installed) -> dict[str, str]:
    """Of what all stages share, and of each megatron-core."""
    shared = study.versions(*PACKAGES)
    return {**shared, "megatron-core": " and ".join(installed.pythons)}


class Outcomes:
    """What came of each stage, in one file; what they printed is in another one beside it."""

    def __init__(self, file: Path, machine: str) -> None:
        self.file, self.machine = file, machine
        self.stages: dict[str, dict[str, Any]] = {}
        for old in (file, file.with_suffix(".log")):
            old.unlink(missing_ok=True)

    def add(self, name: str, **outcome: Any) -> None:
        self.stages[name] = outcome
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"machine": self.machine, "stages": self.stages}) + "\n", encoding="utf-8")
        new.replace(self.file)
        print(f"{name}: {outcome['state']}, {outcome['seconds']:.0f} s", flush=True)

    def log(self, name: str, output: str) -> None:
        with self.file.with_suffix(".log").open("a", encoding="utf-8") as log:
            log.write(f"=== {name}\n{output[-LOG_OF_A_STAGE:]}\n")


def run_stage(stage: Stage, until: float, outcomes: Outcomes) -> None:
    """Run it for its limit, or until time.monotonic() is `until`; what it had written then is kept."""
    start = time.monotonic()
    left = min(stage.limit, until - start)
    if stage.lacks or left < LEAST:
        outcomes.add(stage.name, state=f"left out: {stage.lacks or 'time is up'}", seconds=0)
        return
    result = run(stage.command, environment(**{**VARIABLES, **stage.variables}), timeout=left, cwd=ROOT)
    state = {0: PASSED, None: f"ended after {left:.0f} s"}.get(result.code, f"failed with exit code {result.code}")
    outcomes.log(stage.name, result.output)
    if state != PASSED:
        print(result.tail)
    outcomes.add(stage.name, state=state, seconds=round(time.monotonic() - start, 1), result=read(stage.result))


def read(file: Path | None) -> Any:
    """The output of a stage; None if it has written nothing, or was ended while it wrote."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError):
        return None
