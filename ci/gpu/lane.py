"""Runs the stages of stages.py one after the other; see run.sh and docs/gpu.md."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:
    import tomli as tomllib

import environments
from environments import ROOT

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

NAME_GPU = """
import torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, torch {torch.__version__}")
"""
KEPT = "stage.json"
PASSED, FAILED, LATE = "passed", "failed", "ran out of time"


def read_arguments() -> argparse.Namespace:
    from pythons import release_and_python

    parser = argparse.ArgumentParser(prog="ci/gpu/run.sh", description="What only a GPU can show, in one command.")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="megatron-core of each release, and what it needs")
    parser.add_argument(
        "--python", type=release_and_python, action="append", metavar="RELEASE=PYTHON",
        help="an environment that is there, in place of wheels; with neither, the Python that runs this",
    )  # fmt: skip
    parser.add_argument(
        "--megatron", type=Path, metavar="DIR", help="Megatron-LM: a git repository or a folder of trees"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu", help="cpu: a rehearsal at small size")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="environments, logs and the report")
    parser.add_argument("--only", action="append", metavar="STAGE", help="a pattern, as 'replay 0.18.2*'; repeatable")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="keep the stages that have ended"
    )
    parser.add_argument("--doc", type=Path, metavar="FILE", help="write the tables there, too (docs/gpu.md)")
    options = parser.parse_args()
    for folder in (options.wheels, options.megatron):
        if folder and not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    if options.doc and not options.doc.is_file():
        parser.error(f"--doc {options.doc}: no such file")
    options.out = options.out.resolve()
    options.parser = parser
    return options


def find_pythons(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """({release: Python}, {release: why there is none})."""
    if options.python:
        return dict(options.python), {}
    if options.wheels is None:
        return {metadata.version("megatron-core"): sys.executable}, {}
    releases = environments.releases_in(options.wheels)
    if not releases:
        options.parser.error(f"--wheels {options.wheels}: no wheel of megatron-core is in it")
    made, missing = {}, {}
    for release in releases:
        try:
            made[release] = environments.make(release, options.wheels, options.out / "environments" / release)
        except environments.CannotMake as error:
            missing[release] = str(error)
    return made, missing


def run(stage: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Its record, which is kept with what it wrote."""
    import process
    from figures import NOT_RUN
    from stages import LIMIT, folder_of
    from workers import environment

    folder = folder_of(stage.name, options.out / "stages")
    kept = folder / KEPT
    if options.resume and kept.is_file():
        record = json.loads(kept.read_text(encoding="utf-8"))
        if record["device"] == options.device:
            return record
    start, state, reason = time.monotonic(), NOT_RUN, stage.not_run
    if not reason:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = folder / "log"
        code = process.run(stage.command, {**environment("all"), **stage.environment}, log, LIMIT)
        state = {0: PASSED, None: LATE}.get(code, FAILED)
        reason = "" if state == PASSED else f"{log.relative_to(options.out)}: {last_line(log)}"
    figures = [figure._asdict() for figure in stage.figures(folder, options.device)]
    if options.device == "cpu":
        figures = [{**figure, "met": None} for figure in figures]  # targets are a GPU's
    record = {"stage": stage.name, "device": options.device, "state": state, "reason": reason, "figures": figures}
    record["seconds"] = round(time.monotonic() - start)
    if state != NOT_RUN:
        kept.write_text(json.dumps(record), encoding="utf-8")
    return record


def last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2][:200]


def machine(device: str, python: str) -> str:
    """In words; nothing if there is no such device."""
    if device == "cpu":
        return "a CPU (rehearsal: neither time nor memory is a GPU's)"
    return subprocess.run([python, "-c", NAME_GPU], capture_output=True, text=True).stdout.strip()


def main() -> int:
    options = read_arguments()
    environments.use_tools(options.wheels, options.out / "environments" / "tools")
    import checkouts
    import report
    from replay.source import SourceError
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from stages import Stage, all_stages

    settings = tomllib.loads((ROOT / "ci" / "replay.toml").read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status("environments"):
        pythons, missing = find_pythons(options)
    if not pythons:
        options.parser.error("; ".join(missing.values()))
    try:
        trees = checkouts.find(options.megatron, options.out / "trees", settings["refs"]) if options.megatron else {}
    except SourceError as error:
        options.parser.error(str(error))
    planned = list(all_stages(options.device, pythons, trees, settings["suite"], options.out / "stages"))
    chosen = [stage for stage in planned if any(fnmatch(stage.name, only) for only in options.only or ["*"])]
    if not chosen:
        options.parser.error(
            f"no stage is {' or '.join(options.only)}. There are: {', '.join(s.name for s in planned)}"
        )
    there = machine(options.device, next(iter(pythons.values())))
    if not there:
        chosen = [Stage(s.name, s.command, s.figures, not_run="torch finds no GPU here") for s in chosen]
    found = [
        {"stage": f"environment {release}", "state": FAILED, "seconds": 0, "reason": why, "figures": []}
        for release, why in missing.items()
    ]
    about = {
        "machine": there or "no GPU",
        "device": options.device,
        "environments": {release: environments.versions(python) for release, python in pythons.items()},
        "stages": found,
    }
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        for number, stage in enumerate(chosen, 1):
            task = progress.add_task(f"{number}/{len(chosen)} {stage.name}", total=None)
            found.append(run(stage, options))
            progress.update(task, description=f"{number}/{len(chosen)} {stage.name}: {found[-1]['state']}", total=1)
            progress.update(task, completed=1)
            report.write(about, options.out, options.doc)
    for table in report.tables(about):
        table.show()
    console.print(f"-> {options.out}/report.json, report.md", soft_wrap=True)
    if not there:
        console.print("torch finds no GPU here: nothing was run. --device cpu rehearses the stages.")
    return int(not there or any(one["state"] in (FAILED, LATE) for one in found))


if __name__ == "__main__":
    sys.exit(main())
