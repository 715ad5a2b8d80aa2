"""The commands that run on the machine, the most useful first, and the seconds that each may take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from megatron_mtp_patches.megatrons.known import DEFAULT, REFERENCE

from scripts.common.process import ROOT, free_port, rank_variables
from scripts.common.toml import read_toml
from scripts.replay.report import passing_files

from .machine import TAGS, Installed
from .training import flags_of

HEADS = "--mtp-detach-heads --mtp-clip-grad 0.5"
# The sizes of a CPU only show that a stage runs.
CONFORMANCE = {"gpu": ["tests/conformance"], "cpu": ["tests/conformance/test_record.py"]}
STEP = {"gpu": "--parameters 4000 --starts 1 --turns 10", "cpu": "--parameters 8 --starts 1 --turns 2"}
ACCEPTANCE = {"gpu": "--tokens 8192 --vocabulary 131072", "cpu": "--tokens 4 --vocabulary 1024"}
EVERYTHING = ["tests/conformance", "tests/engine", "tests/cli", "tests/doctor"]
EVERYTHING += ["tests/functional", "tests/megatron_overrides"]
# Upstream's tests: files of these suites of ci/replay.toml of which a test has passed on one CPU rank without
# TransformerEngine, and those of routers, of which none has: they need a GPU.
SUITES = ("optimizer", "Muon, Lion and layer-wise", "optimizer settings", "MTP", "Megatron-FSDP")
SUITES += ("upstream's tests of the changes",)
PASSED = ROOT / "ci" / "replay" / "cpu"
ROUTERS = ("transformer/moe/test_routers.py", "transformer/moe/test_aux_loss.py")
FEW = 2  # files, on a CPU


class Stage(NamedTuple):
    """One command, which writes its result as it comes.

    Attributes:
        limit: seconds.
        result: the JSON that the command writes, if it does.
        lacks: what was not carried along; the stage is left out then.
    """

    name: str
    limit: int
    command: list[str] = []
    variables: dict[str, str] = {}
    result: Path | None = None
    lacks: str = ""


class Command(NamedTuple):
    about: str
    seconds: int  # of all its stages
    stages: Callable[[Installed, str, Path], Iterator[Stage]]


def first(installed: Installed, device: str, work: Path) -> Iterator[Stage]:
    yield stage("status", 40, installed, DEFAULT, ["megatron_mtp_patches", "status"])
    yield suites_stage("conformance", 90, installed, DEFAULT, device, work, CONFORMANCE[device])
    yield training_stage("unpatched", 75, installed, DEFAULT, device, work, "none")
    yield training_stage("repairs", 75, installed, DEFAULT, device, work, "repairs")


def rest(installed: Installed, device: str, work: Path) -> Iterator[Stage]:
    yield training_stage("unpatched, again", 75, installed, DEFAULT, device, work, "none")
    yield training_stage("all, heads apart", 75, installed, DEFAULT, device, work, "all", HEADS)
    yield upstream_stage(120, installed, device, work)
    pythons = [f"--python={release}={python}" for release, python in installed.pythons.items()]
    for name, limit, sizes in (("step", 90, STEP), ("acceptance", 45, ACCEPTANCE)):
        words = ["scripts.bench", name, *sizes[device].split(), "--device", device, "--out", str(work / name), *pythons]
        result, needed = work / name / f"{device}.json", REFERENCE if name == "step" else DEFAULT
        yield stage(name, limit, installed, needed, words, result)
    yield losses_stage(45, installed, device, work)
    yield reproductions_stage(90, installed, device, work)
    yield training_stage("unpatched", 75, installed, REFERENCE, device, work, "none")
    yield training_stage("repairs", 75, installed, REFERENCE, device, work, "repairs")


def every_test(installed: Installed, device: str, work: Path) -> Iterator[Stage]:
    for release in TAGS:
        yield suites_stage("tests", 3600, installed, release, device, work, EVERYTHING)


COMMANDS = {
    "first": Command("three minutes: does it work, and is a training the same?", 170, first),
    "rest": Command("six minutes: times, bytes, upstream's tests, reproductions", 345, rest),
    "all": Command("all tests on CUDA, without a limit of their own", 7200, every_test),
}


def stage(
    name: str,
    limit: int,
    installed: Installed,
    release: str,
    words: list[str],
    result: Path | None = None,
    tree: str = "",
    **variables: str,
) -> Stage:
    """A stage of the Python of `release`; with `tree`, one that needs this tree."""
    if release not in installed.pythons:
        return Stage(name, limit, lacks=f"no wheel of megatron-core {release}")
    if tree and tree not in installed.trees:
        return Stage(name, limit, lacks=f"no {tree}.tar.gz")
    return Stage(name, limit, [installed.pythons[release], "-m", *words], variables, result)


def suites_stage(
    kind: str, limit: int, installed: Installed, release: str, device: str, work: Path, tests: list[str]
) -> Stage:
    name = f"{kind} {release}"
    result = work / "results" / f"{name}.json"
    words = ["scripts.gpu.suites", str(result), *tests]
    return stage(name, limit, installed, release, words, result, TEST_DEVICE=device)


def training_stage(
    variant: str, limit: int, installed: Installed, release: str, device: str, work: Path, patches: str, more: str = ""
) -> Stage:
    name = f"training {TAGS[release].removeprefix('core_v')}, {variant}"
    result = work / "results" / f"{name}.json"
    words = [*on(device), "scripts/gpu/training.py", str(result), str(work / TAGS[release])]
    variables = {**alone(), "MEGATRON_MTP_PATCHES": patches, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    words += flags_of(device, more)
    return stage(name, limit, installed, release, words, result, TAGS[release], **variables)


def upstream_stage(limit: int, installed: Installed, device: str, work: Path) -> Stage:
    tree, version = TAGS[DEFAULT], TAGS[DEFAULT].removeprefix("core_v")
    words = ["scripts.replay", "--megatron", str(work / tree), "--ranks", "1", "--device", device]
    words += ["--minutes", f"{(limit - 20) / 60:.2f}", "--work", str(work / "replay"), "--out", str(work / "upstream")]
    words += [word for file in upstream_files(version)[: FEW if device == "cpu" else None] for word in ("--file", file)]
    result = work / "upstream" / device / f"{version}.json"
    return stage("upstream's tests", limit, installed, DEFAULT, words, result, tree)


def upstream_files(version: str) -> list[str]:
    """Paths below tests/unit_tests; a file that was taken from another commit says of which in its name."""
    suites = {suite["name"]: suite["files"] for suite in read_toml(ROOT / "ci" / "replay.toml")["suite"]}
    patterns = [pattern for name in SUITES for pattern in suites[name]]
    return [
        *ROUTERS,
        *(
            file
            for file in passing_files(PASSED / f"{version}.md", 1)
            if any(fnmatch(re.sub(r"_of_\w+(?=\.py)", "", file), pattern) for pattern in patterns)
        ),
    ]


def losses_stage(limit: int, installed: Installed, device: str, work: Path) -> Stage:
    result = work / "results" / "losses.json"
    words = [*on(device), "scripts/bench/losses_on_gpu.py", str(result), device]
    return stage("losses", limit, installed, DEFAULT, words, result, **alone())


def reproductions_stage(limit: int, installed: Installed, device: str, work: Path) -> Stage:
    result = work / "results" / "reproductions.json"
    words = ["scripts.gpu.reproductions", str(result), *([str(FEW)] if device == "cpu" else [])]
    return stage("reproductions", limit, installed, DEFAULT, words, result)


def on(device: str) -> list[str]:
    """The words after -m that run a script on the device."""
    return ["megatron_mtp_patches", "run", "--device", "cuda" if device == "gpu" else device]


def alone() -> dict[str, str]:
    """The variables of the only rank; torchrun would ask for this machine's name, which may have no answer."""
    return {**rank_variables(0, 1, free_port()), "MASTER_ADDR": "127.0.0.1"}
