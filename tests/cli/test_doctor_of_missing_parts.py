"""`doctor` in a Python that finds only what a test puts there: what each missing or unfit part costs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.megatrons.environment import IMPORTS_OF_TRANSFORMER_ENGINE
from megatron_mtp_patches.megatrons.known import RELEASES, TRANSFORMER_ENGINE

from .fresh_start import REPOSITORY, run_command, standard_library

pytestmark = pytest.mark.forked("python")


@pytest.fixture
def doctor(tmp_path):
    """doctor(): `doctor` in a Python that finds what the command itself needs, in tmp_path, and nothing else."""
    for name in ("rich", "markdown_it", "mdurl", "pygments"):
        (tmp_path / name).symlink_to(Path(find_spec(name).origin).parent)
    return lambda: run_command(["doctor"], [str(tmp_path), *REPOSITORY, *standard_library()], {})


@pytest.fixture
def furnish(tmp_path):
    """furnish(name, ...): the installed Megatron, a torch, and empty packages beside it: packaging and these."""

    def make(*names: str) -> None:
        (tmp_path / "megatron").symlink_to(find_file("megatron.core").parents[1])
        (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
        for name in {"packaging", *names}:
            (tmp_path / name).mkdir()

    return make


def test_without_megatron_and_torch_it_exits_with_1(doctor, rows):
    done = doctor()
    assert done.code == 1
    table = rows(done.output)
    assert table["megatron-core"] == ["missing", "there is nothing to patch"], done.output
    assert table["torch"] == ["missing", "nothing runs"]
    assert table["wrapt"] == ["missing", "no patch can be installed"]
    assert "pip install megatron-core" in done.output


def test_without_wrapt_it_exits_with_1_and_says_the_same_of_the_rest(doctor, furnish, rows, release):
    furnish("triton")
    done = doctor()
    assert done.code == 1 and done.output.startswith("Python ")
    assert f"megatron-core {release} (by its sources)" in done.output and rows(done.output)["wrapt"][0] == "missing"


def test_a_megatron_that_lacks_the_triton_that_it_needs_exits_with_1(doctor, furnish, rows, tmp_path, release):
    furnish("wrapt")
    assert doctor().code == (1 if release in ("0.18.2", "0.19.2") else 0)
    (tmp_path / "triton").mkdir()
    done = doctor()
    assert done.code == 0, done.output
    table = rows(done.output)
    assert table["triton"] == table["wrapt"] == ["present"], "no version, so none that does not fit"


def write_metadata(folder, name, number):
    metadata = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


@pytest.mark.parametrize(
    "name, number, cost, releases",
    [
        ("torch", "2.10.1+cu128", "no rehearsal", RELEASES),
        ("torch", "2.11", "", RELEASES),
        ("wrapt", "1.15.0", "wrapt >= 1.16", RELEASES),
        ("wrapt", "1.16.0rc1", "", RELEASES),
        ("transformer-engine", "2.13.0", "multi-tensor kernels are left out", ("0.17.1", "0.18.2", "0.19.2")),
        ("transformer-engine", "2.12.0", "", ("0.16.1",)),
        ("transformer-engine", "2.14.0", "", RELEASES),
        ("emerging-optimizers", "0.1.0", "no Muon", ("0.18.2", "0.19.2")),
        ("emerging-optimizers", "0.1.0", "", ("0.16.1", "0.17.1")),
        ("emerging-optimizers", "0.2.0", "no Muon", ("0.16.1",)),
        ("emerging-optimizers", "0.2.0", "", ("0.17.1", "0.18.2", "0.19.2")),
    ],
)
def test_a_version_that_does_not_fit_has_its_cost_beside_it(
    doctor, furnish, rows, tmp_path, release, name, number, cost, releases
):
    if release not in releases:
        pytest.skip(f"says nothing of {release}")
    furnish("wrapt", "triton", "emerging_optimizers", "transformer_engine", *IMPORTS_OF_TRANSFORMER_ENGINE)
    write_metadata(tmp_path, name, number)
    done = doctor()
    assert done.code == 0, done.output
    installed, *told = rows(done.output)[name]
    assert installed == number
    assert len(told) == bool(cost) and cost in "".join(told)


def test_it_says_which_transformer_engine_fits_and_what_its_python_imports(doctor, furnish, rows, tmp_path, release):
    furnish("wrapt", "triton")
    installed, told = rows(doctor().output)["transformer-engine"]
    assert installed == "missing" and told.endswith(f"{release} was made for {TRANSFORMER_ENGINE[release]}")
    (tmp_path / "transformer_engine").mkdir()
    installed, told = rows(doctor().output)["transformer-engine"]
    assert installed == "present" and told.startswith("does not import without onnxscript and onnx and pydantic")


def test_a_part_that_cannot_be_imported_has_the_cost_of_a_missing_one(doctor, furnish, rows, tmp_path):
    furnish("wrapt", "triton", "modelopt", "requests")
    installed, told = rows(doctor().output)["nvidia-modelopt"]
    assert installed == "present" and told.startswith("does not import without huggingface-hub: no distillation")
    (tmp_path / "huggingface_hub").mkdir()
    assert rows(doctor().output)["nvidia-modelopt"] == ["present"]


def test_the_trainer_of_megatron_says_which_imports_its_wheel_does_not_ask_for(doctor, furnish, rows, release):
    furnish("wrapt", "triton")
    cells = rows(doctor().output)["megatron.training"]
    if release == "0.16.1":
        assert cells[0] == "missing"
    elif release == "0.19.2":
        assert len(cells) == 1
    else:
        assert cells[1].startswith("does not import without pyyaml: no pretrain()")


def test_a_framework_has_a_row_where_it_is_installed_and_says_which_versions_the_tests_run(
    doctor, furnish, rows, tmp_path
):
    furnish("wrapt", "triton", "verl", "swift")
    write_metadata(tmp_path, "ms_swift", "4.5.0")
    table = rows(doctor().output)
    assert table["verl"][0] == "present" and table["ray"] == ["missing", "main_ppo has no workers"]
    assert not {"mcore-bridge", "Megatron-Bridge", "transformers"} & set(table)
    installed, told = table["ms-swift"]
    assert installed == "4.5.0" and told.startswith("the tests run 4.6.0; `megatron-mtp-patches status` says")
    write_metadata(tmp_path, "verl", "0.9.1")
    assert rows(doctor().output)["verl"] == ["0.9.1"]
