"""Every patch against the megatron-core that is installed here: processes that import it, and what they found.

Importing Megatron takes many seconds, so each process reports everything that any test asks of it, and the processes
run side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSPECT = Path(__file__).with_name("inspect_patches.py")
PATIENCE = 240


@pytest.fixture(scope="session")
def release() -> str:
    return version("megatron-core")


@pytest.fixture(scope="session")
def start_all():
    """start_all(scenario=(arguments, path), ...): run scenarios of inspect_patches.py side by side; their reports."""

    def run(**scenarios: tuple[list[str], tuple[str, ...]]) -> dict[str, dict]:
        processes = {name: _start(name, arguments, path) for name, (arguments, path) in scenarios.items()}
        try:
            return {name: _finish(process) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()

    return run


def _start(scenario: str, arguments: list[str], path: tuple[str, ...]) -> subprocess.Popen:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_MTP_PATCHES")}
    python_path = os.pathsep.join((*path, str(ROOT / "patches"), str(ROOT)))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(INSPECT), scenario, *arguments],
        env={**kept, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen) -> dict:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="session")
def shadow(tmp_path_factory):
    """shadow({module: change}): a folder whose megatron is the installed one with changed source files.

    Put first on the path it shadows the installed one, as a checkout does. Everything else is a link.
    """
    from megatron_mtp_patches.engine.source import find_file

    site = find_file("megatron.core").parents[2]

    def make(changes: dict) -> Path:
        folder = tmp_path_factory.mktemp("checkout")
        _link(site / "megatron", folder / "megatron")
        for module, change in changes.items():
            file = folder / find_file(module).relative_to(site)
            for parent in reversed(file.relative_to(folder).parents[:-1]):
                _open_up(folder / parent)
            source = file.read_text(encoding="utf-8")
            file.unlink()
            file.write_text(change(source), encoding="utf-8")
        return folder

    return make


def _link(source: Path, link: Path) -> None:
    link.symlink_to(source, target_is_directory=source.is_dir())


def _open_up(link: Path) -> None:
    """Turn a link to a folder into a folder of links."""
    if link.is_symlink():
        source = link.resolve()
        link.unlink()
        link.mkdir()
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                _link(entry, link / entry.name)
