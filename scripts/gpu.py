"""What only a GPU shows, in stages: of the release in this Python, or of several releases side by side.

    python -m scripts.gpu release [--megatron DIR ...]             tests, upstream's tests, training
    python -m scripts.gpu together --python RELEASE=PYTHON ...     optimizer.step, acceptance counting

Each stage is one command with a limit of time. `gpu/gpu.json` below --out has how each ended, beside what it printed; a
stage that has passed is not run again while it is recorded there. Ends with 1 if a stage has not passed.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from scripts import study
from scripts.common.arguments import add_pythons, make_parser, positive
from scripts.common.markdown import Table
from scripts.common.process import ROOT, environment, run

PACKAGES = ("torch", "megatron-core", "emerging-optimizers", "transformer-engine", "apex", "pytest")
NAME_GPU = """
import torch
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
"""
OUT = {"gpu": "ci", "cpu": ".gpu"}
TESTS = {
    "gpu": ["tests/conformance", "tests/engine", "tests/cli", "tests/megatron_overrides"],
    "cpu": ["tests/engine/test_selection.py"],
}
# The sizes of a CPU only show that a stage runs.
STEP = {"gpu": "--parameters 4000", "cpu": "--parameters 8 --starts 1 --turns 2"}
ACCEPTANCE = {"gpu": "--tokens 8192 --vocabulary 131072", "cpu": "--tokens 4 --vocabulary 1024"}


class Stage(NamedTuple):
    name: str
    command: list[str]
    variables: dict[str, str] = {}


def make_stage(name: str, module: str, words: list[str], **variables: str) -> Stage:
    return Stage(name, [sys.executable, "-m", module, *words], variables)


def stages_of_release(options: Namespace) -> Iterator[Stage]:
    release, device, results = metadata.version("megatron-core"), options.device, options.out / "gpu"
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={results / f'tests {release}.xml'}", *TESTS[device]]
    yield make_stage(f"tests {release}", "pytest", words, TEST_DEVICE=device)
    checkouts = {version_of(folder): folder.resolve() for folder in options.megatron}
    native = next((folder for version, folder in checkouts.items() if version.startswith("0.19.")), None)
    for version, folder in checkouts.items():
        if version.split(".")[:2] != release.split(".")[:2]:
            continue
        words = ["--megatron", str(folder), *(["--release", version] if (folder / ".git").exists() else [])]
        words += ["--ranks", "1", "--minutes", str(max(1, options.minutes - 1)), "--resume", "--device", device]
        words += ["--work", str(ROOT / ".gpu" / f"replay-{device}"), "--out", str(options.out / "replay")]
        yield make_stage(f"replay {version}", "scripts.replay", words)
        words = ["training", "--checkout", str(folder), *(["--native", str(native)] if native else [])]
        words += ["--json", str(results / f"training {version}.json"), "--device", device]
        yield make_stage(f"training {version}", "scripts.bench", words)


def stages_together(options: Namespace) -> Iterator[Stage]:
    pythons = [f"--python={release}={python}" for release, python in options.python.items()]
    where = ["--device", options.device, "--out", str(options.out / "bench"), *pythons]
    for name, sizes in (("step", STEP), ("acceptance", ACCEPTANCE)):
        yield make_stage(name, "scripts.bench", [name, *sizes[options.device].split(), *where])


def version_of(checkout: Path) -> str:
    return runpy.run_path(str(checkout / "megatron/core/package_info.py"))["__version__"]


class Record:
    """`FILE.json`, and `FILE.md` with the same as a table."""

    def __init__(self, file: Path, machine: str) -> None:
        self.file, self.machine = file, machine
        self.stages: dict[str, dict[str, Any]] = {}
        if file.is_file():
            self.stages = json.loads(file.read_text(encoding="utf-8"))["stages"]

    def add(self, name: str, **outcome: Any) -> None:
        self.stages[name] = outcome
        rows = [
            [stage, row["state"], str(row["seconds"]), ", ".join(map(" ".join, row["versions"].items()))]
            for stage, row in self.stages.items()
        ]
        table = Table(f"Stages on {self.machine}", ["stage", "state", "seconds", "with"], rows, right=[2])
        record = {"machine": self.machine, "stages": self.stages}
        study.write(self.file.with_suffix(""), record, table.title, [table])


def run_stages(stages: list[Stage], record: Record, minutes: float) -> bool:
    """Whether all have passed, now or before."""
    versions = study.versions(*PACKAGES)
    for stage in stages:
        if record.stages.get(stage.name, {}).get("state") == "passed":
            print(f"{stage.name}: passed before")
            continue
        print(f"{stage.name} ...", flush=True)
        log = record.file.with_name(f"{stage.name}.log")
        log.unlink(missing_ok=True)
        start = time.monotonic()
        result = run(stage.command, environment(**stage.variables), log, timeout=60 * minutes)
        state = {0: "passed", None: "ran out of time"}.get(result.code, "failed")
        record.add(stage.name, state=state, seconds=round(time.monotonic() - start), versions=versions)
        print(f"{stage.name}: {state}" if state == "passed" else f"{result.tail}\n{stage.name}: {state}; see {log}")
    return all(record.stages[stage.name]["state"] == "passed" for stage in stages)


def name_machine(device: str) -> str:
    """In words; nothing if there is no such device."""
    if device == "cpu":
        return "a CPU, which shows that the stages run and nothing else"
    return subprocess.run([sys.executable, "-c", NAME_GPU], capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = make_parser("scripts.gpu", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    release = commands.add_parser("release", help="the stages of the release in this Python")
    release.add_argument(
        "--megatron", type=Path, action="append", default=[], metavar="DIR", help="a checkout; may be repeated"
    )
    release.set_defaults(stages=stages_of_release)
    together = commands.add_parser("together", help="the stages that compare releases")
    add_pythons(together)
    together.set_defaults(stages=stages_together)
    for command in (release, together):
        command.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a rehearsal at small size")
        command.add_argument("--minutes", type=positive, default=30, help="limit of a stage (default: 30)")
        command.add_argument("--only", default="", metavar="WORD", help="stages that have this in their name")
        command.add_argument("--out", type=Path, metavar="DIR", help="results (default: ci, on a CPU .gpu)")
    options = parser.parse_args()
    machine = name_machine(options.device)
    if not machine:
        parser.error("torch finds no GPU here; --device cpu rehearses the stages")
    options.out = (options.out or ROOT / OUT[options.device]).resolve()
    (options.out / "gpu").mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in options.stages(options) if options.only in stage.name]
    if not stages:
        print(f"none of these stages has {options.only!r} in its name")
    return int(not run_stages(stages, Record(options.out / "gpu" / f"{options.device}.json", machine), options.minutes))


if __name__ == "__main__":
    sys.exit(main())
