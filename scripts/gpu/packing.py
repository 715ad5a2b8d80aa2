"""Pack what a machine without a network lacks: wheels, and trees of Megatron-LM with upstream's unit tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from megatron_mtp_patches.megatrons.known import REFS

from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.replay.source import Repository, SourceError

from .machine import LIST, TAGS, MachineError, checksum
from .stages import SUITES

WHEELS = (*(f"megatron-core=={release}" for release in TAGS), "emerging-optimizers==0.3.0", "mock==5.2.0")
PYTHON = "312"  # of the machine
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
LIMIT = 40 * 2**20  # bytes
LEFT_OUT = ("tests/functional_tests", "tests/performance_tests", "examples")  # of a tree


def pack(folder: Path, megatron: str) -> None:
    """Write wheels, trees, and LIST, which has the size and the SHA-256 of each.

    Args:
        megatron: a git repository of Megatron-LM, or the URL of one.

    Raises:
        MachineError: something cannot be had, or all is larger than LIMIT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        old.unlink()
    download(folder)
    with tempfile.TemporaryDirectory() as work:
        try:
            repository = Repository(megatron, Path(work))
            for tag in TAGS.values():
                archive(repository, tag, folder)
        except SourceError as error:
            raise MachineError(str(error)) from error
    files = sorted(file for file in folder.iterdir() if file.name != LIST)
    rows = {file.name: {"bytes": file.stat().st_size, "sha256": checksum(file)} for file in files}
    (folder / LIST).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    total = sum(row["bytes"] for row in rows.values())
    for name, row in rows.items():
        print(f"{row['bytes']:>12,}  {name}")
    print(f"{total:>12,}  bytes in all")
    if total > LIMIT:
        raise MachineError(f"{folder} has {total:,} bytes, more than the {LIMIT:,} that may be carried")


def download(folder: Path) -> None:
    """Download WHEELS for the machine's Python, which need not be this one."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--implementation=cp", f"--python-version={PYTHON}", f"--abi=cp{PYTHON}", "--abi=none"]
    words += [*(f"--platform={platform}" for platform in PLATFORMS), "--dest", str(folder)]
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PIP_USER")}
    for wheel in WHEELS:  # one at a time: pip refuses two versions of a package
        done = subprocess.run([*words, wheel], env=kept, capture_output=True, text=True)
        if done.returncode:
            raise MachineError(f"{wheel} cannot be downloaded: {done.stderr.strip()}")


def archive(repository: Repository, tag: str, folder: Path) -> None:
    """Write a tree as TAG.tar.gz, with the tests that the replay takes from other commits."""
    (name,) = (name for name, ref in REFS.items() if ref == tag)
    tree = repository.unpack(name)
    for suite in read_toml(ROOT / "ci" / "replay.toml")["suite"]:
        if suite["name"] in SUITES and name in suite.get("on", ()):
            for file in suite["files"]:
                repository.take(tree, suite["ref"], file)

    def choose(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = info.name.partition("/")[2]
        return None if name.startswith(LEFT_OUT) or name.endswith((".so", ".pyc")) else info

    with tarfile.open(folder / f"{tag}.tar.gz", "w:gz") as tar:
        tar.add(tree.folder, tag, filter=choose)
