"""`doctor`: what is here, and what each missing part costs."""

from __future__ import annotations

import configparser
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_mtp_patches.cli.doctor import PARTS
from megatron_mtp_patches.engine.source import find_file

RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


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
            assert found != "missing" or cost[0], name


@pytest.fixture
def bare(python, tmp_path):
    """bare(): `doctor` in an interpreter that finds what the command itself needs, in tmp_path, and nothing else."""
    for name in ("rich", "markdown_it", "mdurl", "pygments"):
        (tmp_path / name).symlink_to(Path(find_spec(name).origin).parent)
    return lambda: python("-S", "-m", "megatron_mtp_patches", "doctor", first=tmp_path)


@pytest.fixture
def furnish(tmp_path):
    """furnish(name, ...): the installed Megatron, a torch, and empty packages of these names beside it."""

    def make(*names: str) -> None:
        (tmp_path / "megatron").symlink_to(find_file("megatron.core").parents[1])
        (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
        for name in names:
            (tmp_path / name).mkdir()

    return make


def test_without_megatron_and_torch_it_is_1(bare):
    done = bare()
    assert done.returncode == 1
    table = rows(done.stdout)
    assert table["megatron-core"] == ["missing", "there is nothing to patch"], done.stderr
    assert table["torch"] == ["missing", "nothing runs"]
    assert table["wrapt"] == ["missing", "no patch can be installed"]
    assert "pip install megatron-core" in done.stdout


def test_without_wrapt_it_still_tells(bare, furnish, release):
    furnish("triton")
    done = bare()
    assert (done.returncode, done.stderr) == (1, "")
    assert f"like {release}" in done.stdout and rows(done.stdout)["wrapt"][0] == "missing"


def test_a_megatron_that_needs_triton_and_has_none_is_1(bare, furnish, tmp_path, release):
    furnish("wrapt")
    assert bare().returncode == (1 if release in ("0.18.2", "0.19.2") else 0)
    (tmp_path / "triton").mkdir()
    done = bare()
    assert done.returncode == 0, done.stdout
    table = rows(done.stdout)
    assert table["triton"] == table["wrapt"] == ["present"], "no version, so none that does not fit"


@pytest.mark.parametrize(
    "name, number, cost, releases",
    [
        ("torch", "2.10.1+cu128", "no rehearsal", RELEASES),
        ("torch", "2.11", "", RELEASES),
        ("wrapt", "1.15.0", "wrapt >= 1.16", RELEASES),
        ("wrapt", "1.16.0rc1", "", RELEASES),
        ("emerging-optimizers", "0.1.0", "no Muon", ("0.18.2", "0.19.2")),
        ("emerging-optimizers", "0.1.0", "", ("0.16.1", "0.17.1")),
        ("emerging-optimizers", "0.2.0", "no Muon", ("0.16.1",)),
        ("emerging-optimizers", "0.2.0", "", ("0.17.1", "0.18.2", "0.19.2")),
    ],
)
def test_an_unfit_version_says_what_it_costs(bare, furnish, tmp_path, release, name, number, cost, releases):
    if release not in releases:
        pytest.skip(f"says nothing of {release}")
    furnish("wrapt", "triton", "emerging_optimizers")
    metadata = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    done = bare()
    assert done.returncode == 0, done.stderr
    found, *told = rows(done.stdout)[name]
    assert found == number
    assert len(told) == bool(cost) and cost in "".join(told)


def test_a_part_that_cannot_be_imported_is_as_good_as_missing(bare, furnish, tmp_path):
    furnish("wrapt", "triton", "modelopt", "requests")
    found, told = rows(bare().stdout)["nvidia-modelopt"]
    assert found == "present" and told.startswith("does not import without huggingface_hub: no distillation")
    (tmp_path / "huggingface_hub").mkdir()
    assert rows(bare().stdout)["nvidia-modelopt"] == ["present"]


def test_megatron_s_trainer_wants_what_its_wheel_does_not(bare, furnish, release):
    furnish("wrapt", "triton")
    cells = rows(bare().stdout)["megatron.training"]
    if release == "0.16.1":
        assert cells[0] == "missing"
    elif release == "0.19.2":
        assert len(cells) == 1
    else:
        assert cells[1].startswith("does not import without yaml: no pretrain()")


def test_the_oldest_wrapt_is_the_one_that_an_install_takes(doctor):
    """Two figures, one of them in setup.cfg."""
    needed = configparser.ConfigParser()
    needed.read(Path(__file__).parents[2] / "setup.cfg")
    oldest = next(line for line in needed["options"]["install_requires"].splitlines() if line.startswith("wrapt"))
    (limit,) = next(part for part in PARTS if part.distribution == "wrapt").limits
    assert oldest == f"wrapt>={'.'.join(map(str, limit.lowest))}" and oldest[7:] in limit.cost
