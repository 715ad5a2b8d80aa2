"""A machine without a network: what `pack` has written is unpacked there, for the Python that has torch."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megatron_mtp_patches.megatrons.known import DEFAULT, MEGATRONS, REFERENCE

from scripts import study
from scripts.replay.source import wheel_files

TAGS = {one["version"]: one["tag"] for one in MEGATRONS if one["version"] in (DEFAULT, REFERENCE)}  # that are carried
LIST = "packed.json"  # of the folder that is carried
PACKAGES = ("torch", "emerging-optimizers", "transformer-engine", "apex", "pytest")
NAME_GPU = """
import torch
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
"""
A_CPU = "a CPU, which shows that the stages run and nothing else"


class MachineError(Exception):
    """Says what is wrong with the machine or with what was carried to it, and what to do."""


class Installed(NamedTuple):
    """What was unpacked.

    Attributes:
        pythons: {release of megatron-core: a Python that imports it}.
        trees: {tag of Megatron-LM: folder}.
    """

    pythons: dict[str, str]
    trees: dict[str, Path]


def install(packed: Path, work: Path) -> Installed:
    """Unpack the wheels and trees of `packed` below `work`.

    A release of megatron-core without a wheel counts where this Python has it already, as in NVIDIA's images.

    Raises:
        MachineError: `packed` is not what `pack` has written, or pip fails.
    """
    files = read_list(packed)
    shutil.rmtree(work, ignore_errors=True)
    wheels = [file for file in files if file.suffix == ".whl"]
    megatrons = {file.name.split("-")[1]: file for file in wheels if file.name.startswith("megatron_core-")}
    others = [file for file in wheels if file not in megatrons.values()]
    if release := study.versions("megatron-core").get("megatron-core"):
        megatrons.setdefault(release, None)
    pythons = {}
    for release, wheel in megatrons.items():
        unpack_wheels([wheel, *others] if wheel else others, work / release)
        pythons[release] = write_python(work / f"python-{release}", work / release)
    trees = {}
    for file in files:
        if file.name.endswith(".tar.gz"):
            with tarfile.open(file) as tar:
                tar.extractall(work, filter="data")
            trees[file.name.removesuffix(".tar.gz")] = work / file.name.removesuffix(".tar.gz")
    for release, tag in TAGS.items():
        if release in pythons and tag in trees:
            copy_helpers(work / release, trees[tag])
    return Installed(pythons, trees)


def read_list(packed: Path) -> list[Path]:
    """The files that `packed` has by its LIST, each with its checksum."""
    try:
        listed = json.loads((packed / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MachineError(f"{packed} has no {LIST}: write it with `python -m scripts.gpu pack {packed}`") from error
    for name, row in listed.items():
        if not (packed / name).is_file() or checksum(packed / name) != row["sha256"]:
            raise MachineError(f"{packed / name} is missing or not what its {LIST} says: pack and carry it again")
    return [packed / name for name in listed]


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def unpack_wheels(wheels: list[Path], site: Path) -> None:
    if wheels:
        words = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps"]
        words += ["--no-compile", "--disable-pip-version-check", "--root-user-action=ignore", "--target", str(site)]
        done = subprocess.run([*words, *map(str, wheels)], capture_output=True, text=True)
        if done.returncode:
            raise MachineError(f"{', '.join(file.name for file in wheels)} cannot be installed: {done.stderr.strip()}")


def write_python(file: Path, site: Path) -> str:
    """Write a command that is this Python with `site` before all others."""
    path, python = shlex.quote(str(site)), shlex.quote(sys.executable)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\nPYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}" exec {python} "$@"\n')
    file.chmod(0o755)
    return str(file)


def copy_helpers(site: Path, tree: Path) -> None:
    """Copy the compiled dataset helpers of a megatron-core into a tree, where Megatron would run `make`."""
    pattern = "megatron/core/datasets/helpers_cpp*.so"
    for helpers in [*site.glob(pattern)] or wheel_files(pattern):
        shutil.copy(helpers, tree / "megatron" / "core" / "datasets")


def name_machine(device: str) -> str:
    """The machine in words.

    Raises:
        MachineError: there is no GPU.
    """
    if device == "cpu":
        return A_CPU
    done = subprocess.run([sys.executable, "-c", NAME_GPU], capture_output=True, text=True)
    if not done.stdout.strip():
        reason = "".join(f" ({line})" for line in done.stderr.splitlines()[-1:])
        raise MachineError(f"torch finds no GPU here{reason}; --device cpu rehearses the stages")
    return done.stdout.strip()


def lacking() -> list[str]:
    """The modules that every stage needs and this Python lacks."""
    needed = ("torch", "numpy", "packaging", "wrapt", "rich", "psutil", "pytest", "hypothesis")
    return [name for name in needed if find_spec(name) is None]
