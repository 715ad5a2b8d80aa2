"""What the lane runs: each stage is one command with a folder of its own, a limit, and figures read from its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import environments
import figures
from checkouts import ROOT, Checkout
from figures import Figure

MINUTES = 10
LIMIT = 60.0 * MINUTES - 15  # seconds; those that are left are to end its processes
NO_CHECKOUT = "no checkout given"
NO_FUSED_ADAM = "transformer-engine is not installed, whose FusedAdam it measures"
TESTS = {
    "gpu": ["tests/conformance tests/engine tests/cli", "tests/megatron_overrides"],
    "cpu": ["tests/megatron_overrides/core/optimizer/test_optimizer_config.py"],
}
# Of the GPU's sizes the numbers are to be had, of the CPU's only that they come about.
STEP = {"gpu": "--parameters 4000", "cpu": "--parameters 8 --starts 1 --turns 2"}
ACCEPTANCE = {"gpu": "--tokens 8192 --vocabulary 131072", "cpu": "--tokens 4 --vocabulary 1024"}
MEMORY = {"gpu": "--layers 24 --hidden 1536", "cpu": "--layers 1 --hidden 16 --cpu"}
MUON = {"gpu": "", "cpu": "--steps 2"}


@dataclass(frozen=True)
class Stage:
    """`not_run` says why it cannot be run."""

    name: str
    command: list[str]
    figures: Callable[[Path, str], list[Figure]]
    environment: dict[str, str] = field(default_factory=dict)
    not_run: str = ""


def folder_of(name: str, out: Path) -> Path:
    return out / re.sub(r"[^\w.]+", "-", name)


def all_stages(
    device: str, pythons: dict[str, str], checkouts: dict[str, Checkout], suites: list[dict], out: Path
) -> Iterator[Stage]:
    """`pythons` has a Python for each release, `suites` those of ci/replay.toml; each stage writes below `out`."""
    newest = list(pythons.values())[-1]
    scripts = ROOT / "scripts"
    for release, python in pythons.items():
        for paths in TESTS[device]:
            name = f"tests {release} {Path(paths.split()[0]).stem}"
            options = ["-q", "-p", "no:cacheprovider"]
            yield Stage(
                name, [python, "-m", "pytest", *options, *paths.split()], figures.suites, {"TEST_DEVICE": device}
            )
    yield from _replays(device, pythons, checkouts, suites, out)
    yield from _trainings(device, pythons, checkouts, out)
    given = [f"--python={release}={python}" for release, python in pythons.items()]
    bench = [newest, str(scripts / "bench.py")]
    for row, sizes, reader in (("step", STEP, figures.step), ("acceptance", ACCEPTANCE, figures.acceptance)):
        where = ["--device", device, "--out", str(folder_of(row, out)), *given]
        yield Stage(row, [*bench, row, *sizes[device].split(), *where], reader)
    for release, python in pythons.items():
        name = f"memory {release}"
        words = ["fsdp-without-master-weights", "--ranks", "1", *MEMORY[device].split()]
        file = ["--json", str(folder_of(name, out) / "memory.json")]
        command = [python, str(scripts / "bench_memory.py"), *words, *file]
        has_fused_adam = "transformer-engine" in environments.versions(python)
        yield Stage(name, command, figures.memory, not_run="" if has_fused_adam else NO_FUSED_ADAM)
    folder = folder_of("muon", out)
    words = ["--device", device, "--dtype", "bfloat16", *MUON[device].split(), "--output", str(folder)]
    command = [newest, str(scripts / "muon_stall.py"), *words, "--json", str(folder / "muon.json")]
    yield Stage("muon", command, figures.muon)


def _replays(
    device: str, pythons: dict[str, str], checkouts: dict[str, Checkout], suites: list[dict], out: Path
) -> Iterator[Stage]:
    """One stage for each suite: all of a release's would take longer than a stage may."""
    if not checkouts:
        yield Stage("replay", [], figures.replay, not_run=NO_CHECKOUT)
    for release, checkout in checkouts.items():
        for suite in suites:
            here = release in suite.get("on", [release]) and 1 in suite.get("ranks", [1])
            if here and (checkout.has_history or "ref" not in suite):
                name = f"replay {release} {suite['name']}"
                folder = folder_of(name, out)
                words = [*checkout.replay, "--suite", suite["name"], "--ranks", "1", "--device", device]
                words += ["--minutes", str(MINUTES - 1), "--work", str(folder / "work"), "--out", str(folder)]
                command = [_python_for(release, pythons), str(ROOT / "scripts/replay_upstream.py"), *words]
                yield Stage(name, command, figures.replay)


def _trainings(device: str, pythons: dict[str, str], checkouts: dict[str, Checkout], out: Path) -> Iterator[Stage]:
    if not checkouts:
        yield Stage("training", [], figures.training, not_run=NO_CHECKOUT)
    native = next((one for release, one in checkouts.items() if release.startswith("0.19.")), None)
    for release, checkout in checkouts.items():
        name = f"training {release}"
        words = [str(folder_of(name, out) / "training.json"), "--checkout", str(checkout.folder), "--device", device]
        words += ["--native", str(native.folder)] if native else []
        command = [_python_for(release, pythons), str(ROOT / "ci/gpu/training.py"), *words]
        yield Stage(name, command, figures.training)


def _python_for(release: str, pythons: dict[str, str]) -> str:
    """Megatron comes from the checkout; what else was installed for the same minor release, or the newest."""
    same = [python for other, python in pythons.items() if other.split(".")[:2] == release.split(".")[:2]]
    return [*pythons.values(), *same][-1]
