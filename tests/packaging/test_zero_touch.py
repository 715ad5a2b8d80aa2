"""`enable` and `disable`: what they change for the Pythons of an environment, and for the jobs that these run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from megatron_mtp_patches.cli.zero_touch import FILE, TEXT

from tests.fresh_process import imports_megatron
from tests.pages import read_with_patches, shown

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("runs in an environment with the wheel alone")]
LOADED = ("-c", "import sys; print('megatron_mtp_patches' in sys.modules)")
ASKED = {"MEGATRON_MTP_PATCHES": "all"}
TYPO = {"MEGATRON_MTP_PATCHES": "typo"}
# A job whose author reckons with no Megatron must not take a refused patch for that.
FORGIVING_JOB = "try:\n import megatron.core\nexcept ImportError:\n print('trains without')"


@pytest.fixture
def enabled(environment):
    assert environment.command("enable").returncode == 0
    yield environment
    environment.command("disable")


@pytest.fixture
def megatron(tmp_path) -> dict[str, str]:
    """The variable that shows a Megatron whose source is unknown."""
    optimizer = tmp_path / "megatron" / "core" / "optimizer"
    optimizer.mkdir(parents=True)
    for folder in (optimizer.parent, optimizer):
        (folder / "__init__.py").touch()
    (optimizer / "optimizer.py").write_text("class ChainedOptimizer:\n    def step(self): pass\n")
    return {"PYTHONPATH": str(tmp_path)}


def files(environment) -> list[Path]:
    return sorted(environment.site.glob("*.pth"))


@pytest.mark.parametrize(
    "words, loaded",
    [
        *(((), "True"), (("-I",), "True"), (("-E",), "True"), (("-s",), "True"), (("-O",), "True"), (("-OO",), "True")),
        *((("-S",), "False"), (("-S", "-I"), "False")),  # they read no site-packages
    ],
    ids=str,
)
def test_enabled_and_asked_for_every_python_applies_the_patches(enabled, words, loaded):
    assert enabled.prints(*words, *LOADED, **ASKED) == f"{loaded}\n"


@pytest.mark.parametrize("variables", [{}, {"MEGATRON_MTP_PATCHES": ""}], ids=["unset", "empty"])
def test_where_it_is_not_asked_for_it_loads_no_module(enabled, variables):
    modules = ("-c", "import sys; print(*sorted(sys.modules))")
    with_file = enabled.prints(*modules, **variables)
    enabled.command("disable")
    assert with_file == enabled.prints(*modules, **variables)


def test_the_commands_of_the_page(environment, tmp_path):
    text = shown("zero-touch") + shown("zero-touch-off")
    (enable, _), ((_, *check), patches), (disable, _) = read_with_patches(text, tmp_path)
    asked = {"MEGATRON_MTP_PATCHES": patches}
    assert patches == "repairs" and "# True\n" in text
    assert environment.prints(*check, **asked) == "False\n"
    assert "Enabled by" in environment.command(*enable[1:]).stdout
    assert environment.prints(*check, **asked) == "True\n"
    assert environment.command(*disable[1:]).returncode == 0 and files(environment) == []


def test_a_second_time_nothing_changes(environment):
    first, second = environment.command("enable"), environment.command("enable")
    assert (first.returncode, second.returncode) == (0, 0)
    assert str(environment.site) in first.stdout and "already" not in first.stdout
    assert "already" in second.stdout
    assert files(environment) == [environment.site / FILE]
    assert (environment.site / FILE).read_text() == TEXT
    first, second = environment.command("disable"), environment.command("disable")
    assert (first.returncode, second.returncode) == (0, 0)
    assert str(environment.site / FILE) in first.stdout and "Not enabled" in second.stdout
    assert files(environment) == []


def test_a_file_of_another_version_is_replaced(enabled):
    (enabled.site / FILE).write_text("import no_longer_there\n")
    assert "already" not in enabled.command("enable").stdout
    assert (enabled.site / FILE).read_text() == TEXT


@pytest.mark.parametrize("words", [("status",), ("status", "--json"), ("doctor",)], ids=" ".join)
def test_status_and_doctor_say_whether_it_is_enabled(enabled, words):
    assert f"enabled in {enabled.site}; MEGATRON_MTP_PATCHES is not set" in enabled.command(*words).stdout
    assert "MEGATRON_MTP_PATCHES=all" in enabled.command(*words, **ASKED).stdout
    enabled.command("disable")
    assert "not enabled" in enabled.command(*words).stdout
    asked = enabled.command(*words, **ASKED).stdout
    assert "not enabled; MEGATRON_MTP_PATCHES=all acts only where the package is imported" in asked


# -- what goes wrong as Python starts fails the job, not Python ------------------------------------------------------


def test_a_refused_patch_stops_the_job_as_a_plain_import_does(enabled, megatron):
    job = "import megatron.core.optimizer.optimizer; print('trains')"
    line = enabled.fails("-c", job, **megatron, **ASKED)
    assert "PatchError: " in line
    assert line == enabled.fails("-c", f"import megatron_mtp_patches\n{job}", **megatron)


@pytest.mark.parametrize(
    "job", ["import megatron.core", "from megatron.core.optimizer import optimizer", FORGIVING_JOB]
)
def test_a_wrong_variable_stops_what_imports_megatron(enabled, megatron, job):
    assert "unknown patch 'typo'" in enabled.fails("-c", job, **megatron, **TYPO)


def test_a_wrong_variable_is_silent_elsewhere_and_forgotten_if_the_script_corrects_it(enabled, megatron):
    assert enabled.prints("-c", "print('works')", **TYPO) == "works\n"
    job = "import os; os.environ['MEGATRON_MTP_PATCHES'] = 'none'; import megatron_mtp_patches, megatron.core; print(1)"
    assert enabled.prints("-c", job, **megatron, **TYPO) == "1\n"


def test_without_the_package_python_starts_silently_and_the_job_fails(make_environment, megatron):
    environment = make_environment()
    environment.command("enable")
    shutil.rmtree(environment.site / "megatron_mtp_patches")
    for variables in ({}, ASKED):
        for words in ([], ["-I"], ["-OO"]):
            assert environment.prints(*words, "-c", "print('works')", **variables) == "works\n"
    assert "MEGATRON_MTP_PATCHES is set" in environment.fails("-c", FORGIVING_JOB, **megatron, **ASKED)
    environment.prints("-c", "import megatron.core", **megatron)


def test_pip_uninstall_leaves_an_inert_file_and_an_upgrade_stays_enabled(make_environment, wheel):
    pytest.importorskip("ensurepip")
    environment = make_environment(pip=True)
    before = set(environment.site.iterdir())
    environment.command("enable")
    pip = ("-m", "pip", "--quiet")
    environment.prints(*pip, "install", "--no-index", "--force-reinstall", "--no-deps", str(wheel))
    assert environment.prints(*LOADED, **ASKED) == "True\n"
    assert environment.run(*pip, "uninstall", "--yes", "megatron-mtp-patches").returncode == 0
    assert set(environment.site.iterdir()) - before == {environment.site / FILE}
    for variables in ({}, ASKED):
        assert environment.prints(*LOADED, **variables) == "False\n"


# -- where it is written, and where not ------------------------------------------------------------------------------


def test_what_only_python_path_finds_is_not_enabled(make_environment, installed):
    environment = make_environment()
    for folder in environment.site.glob("megatron_*"):
        shutil.rmtree(folder)
    (metadata,) = installed.glob("*.dist-info")
    for more in ([], [metadata]):  # the metadata alone, which an uninstall by hand leaves
        for folder in more:
            shutil.copytree(folder, environment.site / folder.name, dirs_exist_ok=True)
        done = environment.command("enable", PYTHONPATH=str(installed))
        assert (done.returncode, done.stdout, files(environment)) == (1, "", [])
        assert "is not installed in" in done.stderr and str(installed) in done.stderr


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(environment):
    (environment.site / FILE).mkdir()
    done = environment.command("enable")
    (environment.site / FILE).rmdir()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {environment.site / FILE}: " in done.stderr and "Traceback" not in done.stderr


def test_installed_for_a_user_it_is_enabled_for_that_user(environment, installed, tmp_path):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "lib" / version / "site-packages"
    shutil.copytree(installed, site)
    base = type(environment)(Path(os.path.realpath(environment.python)), site)
    user = {"PYTHONUSERBASE": str(tmp_path)}
    if base.run("-c", "import site; print(site.ENABLE_USER_SITE)", **user).stdout != "True\n":
        pytest.skip("this Python reads no folder of the user's")
    assert base.command("enable", **user).returncode == 0
    assert files(base) == [site / FILE]
    for words, loaded in (((), "True"), (("-I",), "False"), (("-s",), "False")):  # without what is the user's
        assert base.run(*words, *LOADED, **user, **ASKED).stdout == f"{loaded}\n"


# -- a real job ------------------------------------------------------------------------------------------------------

JOB = """
import multiprocessing, sys

def is_patched():
    from megatron.core.optimizer import OptimizerConfig
    return 'min_clip_coefficient' in OptimizerConfig.__dataclass_fields__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print('patched:', is_patched(), 'worker:', pool.apply(is_patched), flush=True)
"""


@imports_megatron
def test_a_script_that_cannot_be_edited_and_its_workers_under_torchrun(enabled, tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    # the environment's own Python, with the torch and the Megatron of the one that tests
    variables = {"PYTHONPATH": str(Path(importlib.util.find_spec("torch").origin).parents[1])}
    variables |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "1")
    done = enabled.run(*launcher, str(job), **variables, **ASKED)
    assert done.returncode == 0, done.stderr
    assert "patched: True worker: True" in done.stdout
