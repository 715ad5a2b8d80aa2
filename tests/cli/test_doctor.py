"""`doctor`: what is here, and what each missing part costs."""

from __future__ import annotations

import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest


def rows(output: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("│┃| ").split("│")] for line in output.splitlines() if "│" in line]
    return {name: rest for name, *rest in cells}


@pytest.fixture(scope="module")
def doctor(command):
    return command("doctor")


def test_what_training_needs_is_here_so_it_is_0(doctor, release):
    assert doctor.returncode == 0, doctor.stderr
    assert platform.python_version() in doctor.stdout
    table = rows(doctor.stdout)
    assert table["torch"][0] == version("torch")
    assert table["megatron-core"][0] == release


def test_a_missing_part_says_what_is_lost(doctor):
    table = rows(doctor.stdout)
    assert set(table) >= {"triton", "transformer-engine", "apex", "emerging-optimizers", "nvidia-modelopt", "GPU"}
    for name, (found, *cost) in table.items():
        if name != "GPU":
            assert bool(cost and cost[0]) == (found == "missing"), name


def test_without_megatron_and_torch_it_is_1(python, tmp_path):
    """An interpreter without site-packages but for what the command itself needs."""
    for name in ("rich", "markdown_it", "mdurl", "pygments"):
        (tmp_path / name).symlink_to(Path(find_spec(name).origin).parent)
    done = python("-S", "-m", "megatron_mtp_patches", "doctor", first=tmp_path)
    assert done.returncode == 1
    table = rows(done.stdout)
    assert table["megatron-core"] == ["missing", "there is nothing to patch"], done.stderr
    assert table["torch"] == ["missing", "nothing runs"]
    assert "pip install megatron-core" in done.stdout
