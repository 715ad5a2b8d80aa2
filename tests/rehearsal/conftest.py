"""Replays pytest files inside a rehearsal, each rank a process of its own, since it lasts for the process."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGIN = "megatron_mtp_patches.rehearsal.pytest_plugin"


def test_names(file: str) -> list[str]:
    """The test functions of a file that this process must not import."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without a launcher's variables, with the package importable."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    root = HERE.parents[1]
    path = os.pathsep.join([str(root / "patches"), str(root), kept.get("PYTHONPATH", "")])
    # a rehearsal needs no patch, and these tests meet a Megatron that is made up
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MEGATRON_MTP_PATCHES": "none", **extra}


@pytest.fixture(scope="session")
def replay(tmp_path_factory):
    """replay(file, ranks) -> {test name: what went wrong, on any rank}; each file runs once."""
    cache: dict[str, dict[str, str]] = {}

    def run(file: str, ranks: int) -> dict[str, str]:
        if file not in cache:
            cache[file] = _replay(file, ranks, tmp_path_factory.mktemp("replay"))
        return cache[file]

    return run


def _replay(file: str, ranks: int, folder: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    launched = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    processes = []
    for rank in range(ranks):
        rank_is = {**launched, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        options = ["-p", PLUGIN, "-p", "no:cacheprovider", "-q", f"--junitxml={folder / str(rank)}.xml"]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, str(HERE / file)],
                env=clean_environment(**rank_is),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
        )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    problems: dict[str, str] = {}
    for rank, output in enumerate(outputs):
        report = folder / f"{rank}.xml"
        assert report.exists(), output
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("name", "").partition("[")[0]
            failed = [child.text or "" for child in case if child.tag in ("failure", "error")]
            problems[name] = problems.get(name, "") + "".join(f"rank {rank}: {text}\n" for text in failed)
    return problems
