"""`enable` and `disable`: what they change for the Pythons of an environment, and for the jobs that these run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from megatron_mtp_patches.cli.zero_touch import FILE, TEXT

from tests.interpreter import imports_megatron
from tests.pages import read_by_bash, shown

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("runs in an environment with the wheel alone")]
LOADED = "import sys; print('megatron_mtp_patches' in sys.modules)"
MODULES = "import sys; print(*sorted(sys.modules))"
# A job whose author reckons with no Megatron must not take a refused patch for that.
FORGIVING_JOB = "try:\n import megatron.core\nexcept ImportError:\n print('trains without')"


@pytest.fixture
def enabled(environment):
    done = environment.command("enable")
    assert done.returncode == 0, done.stderr
    yield environment
    environment.command("disable")


@pytest.fixture
def megatron(tmp_path) -> Path:
    """A folder with a Megatron whose source is unknown."""
    optimizer = tmp_path / "megatron" / "core" / "optimizer"
    optimizer.mkdir(parents=True)
    for folder in (optimizer.parent, optimizer):
        (folder / "__init__.py").touch()
    (optimizer / "optimizer.py").write_text("class ChainedOptimizer:\n    def step(self): pass\n")
    return tmp_path


def files(environment) -> list[Path]:
    return sorted(environment.site.glob("*.pth"))


def test_a_variable_alone_does_nothing(environment):
    assert environment.run("-c", LOADED, MEGATRON_MTP_PATCHES="all").stdout == "False\n"


@pytest.mark.parametrize("words", [[], ["-I"], ["-E"], ["-s"], ["-O"], ["-OO"]], ids=str)
def test_enabled_and_asked_for_every_python_applies_the_patches(enabled, words):
    done = enabled.run(*words, "-c", LOADED, MEGATRON_MTP_PATCHES="all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("words", [["-S"], ["-S", "-I"]], ids=str)
def test_a_python_that_reads_no_site_packages_starts_as_before(enabled, words):
    done = enabled.run(*words, "-c", LOADED, MEGATRON_MTP_PATCHES="all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("variables", [{}, {"MEGATRON_MTP_PATCHES": ""}], ids=["unset", "empty"])
def test_where_it_is_not_asked_for_it_loads_no_module(environment, enabled, variables):
    with_file = enabled.run("-c", MODULES, **variables)
    environment.command("disable")
    without = environment.run("-c", MODULES, **variables)
    assert (with_file.returncode, with_file.stderr) == (0, "")
    assert with_file.stdout == without.stdout


def test_the_commands_of_the_page(environment, tmp_path):
    text = shown("zero-touch") + shown("zero-touch-off")
    assert "\nMEGATRON_MTP_PATCHES=all python -c" in text and "# True\n" in text
    enable, (_, *check), disable = read_by_bash(text, tmp_path)
    assert environment.run(*check, MEGATRON_MTP_PATCHES="all").stdout == "False\n"
    assert "Enabled by" in environment.command(*enable[1:]).stdout
    assert environment.run(*check, MEGATRON_MTP_PATCHES="all").stdout == "True\n"
    assert environment.command(*disable[1:]).returncode == 0 and files(environment) == []


def test_enabling_twice_changes_nothing(environment):
    first, second = environment.command("enable"), environment.command("enable")
    assert (first.returncode, second.returncode) == (0, 0)
    assert str(environment.site) in first.stdout and "already" not in first.stdout
    assert "already" in second.stdout
    assert files(environment) == [environment.site / FILE]
    assert (environment.site / FILE).read_text() == TEXT


def test_a_file_of_another_version_is_replaced(enabled):
    (enabled.site / FILE).write_text("import no_longer_there\n")
    assert "already" not in enabled.command("enable").stdout
    assert (enabled.site / FILE).read_text() == TEXT


def test_disable_removes_the_file_and_does_nothing_a_second_time(environment, enabled):
    first, second = environment.command("disable"), environment.command("disable")
    assert (first.returncode, second.returncode) == (0, 0)
    assert str(environment.site / FILE) in first.stdout and "Not enabled" in second.stdout
    assert files(environment) == []


def test_status_and_doctor_say_whether_it_is_enabled(environment, enabled):
    for words in (["status"], ["status", "--json"], ["doctor"]):
        assert f"enabled in {enabled.site}; MEGATRON_MTP_PATCHES is not set" in enabled.command(*words).stdout, words
        assert "MEGATRON_MTP_PATCHES=all" in enabled.command(*words, MEGATRON_MTP_PATCHES="all").stdout, words
    environment.command("disable")
    for words in (["status"], ["status", "--json"], ["doctor"]):
        assert "not enabled" in environment.command(*words).stdout, words
        asked = environment.command(*words, MEGATRON_MTP_PATCHES="all").stdout
        assert "not enabled; MEGATRON_MTP_PATCHES=all acts only where the package is imported" in asked, words


# -- what goes wrong as Python starts fails the job, not Python ------------------------------------------------------


def test_a_refused_patch_stops_the_job_as_a_plain_import_does(enabled, megatron):
    job = "import megatron.core.optimizer.optimizer; print('trains')"
    done = enabled.run("-c", job, PYTHONPATH=str(megatron), MEGATRON_MTP_PATCHES="all")
    plain = enabled.run("-c", f"import megatron_mtp_patches\n{job}", PYTHONPATH=str(megatron))
    assert (done.returncode, plain.returncode) == (1, 1)
    assert (done.stdout, plain.stdout) == ("", "")
    assert "PatchError: " in done.stderr and done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "job", ["import megatron.core", "from megatron.core.optimizer import optimizer", FORGIVING_JOB]
)
def test_a_wrong_variable_stops_what_imports_megatron(enabled, megatron, job):
    done = enabled.run("-c", job, PYTHONPATH=str(megatron), MEGATRON_MTP_PATCHES="typo")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown patch 'typo'" in done.stderr.splitlines()[-1]


def test_a_wrong_variable_is_silent_elsewhere(enabled):
    done = enabled.run("-c", "print('works')", MEGATRON_MTP_PATCHES="typo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")


def test_a_wrong_variable_that_the_script_corrects_is_forgotten(enabled, megatron):
    job = "import os; os.environ['MEGATRON_MTP_PATCHES'] = 'none'; import megatron_mtp_patches, megatron.core; print(1)"
    done = enabled.run("-c", job, PYTHONPATH=str(megatron), MEGATRON_MTP_PATCHES="typo")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("variable", ["MEGATRON_MTP_PATCHES", "MEGATRON_MTP_PATCHES_ON_DRIFT"])
def test_the_command_reports_it_in_one_line_and_exits_with_2(enabled, variable):
    variables = {"MEGATRON_MTP_PATCHES": "all", variable: "typo"}
    done = enabled.command("status", **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("megatron-mtp-patches: ") and "'typo'" in done.stderr


def test_without_the_package_python_starts_silently_and_the_job_fails(make_environment, megatron):
    gone = make_environment()
    gone.command("enable")
    shutil.rmtree(gone.site / "megatron_mtp_patches")
    for variables in ({}, {"MEGATRON_MTP_PATCHES": "all"}):
        for words in ([], ["-I"], ["-OO"]):
            done = gone.run(*words, "-c", "print('works')", **variables)
            assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")
    job = gone.run("-c", FORGIVING_JOB, PYTHONPATH=str(megatron), MEGATRON_MTP_PATCHES="all")
    assert (job.returncode, job.stdout) == (1, "")
    assert "MEGATRON_MTP_PATCHES is set" in job.stderr.splitlines()[-1]
    assert gone.run("-c", "import megatron.core", PYTHONPATH=str(megatron)).returncode == 0


def test_pip_uninstall_leaves_an_inert_file_and_an_upgrade_stays_enabled(make_environment, wheel):
    pytest.importorskip("ensurepip")
    environment = make_environment(pip=True)
    before = set(environment.site.iterdir())
    environment.command("enable")
    again = environment.run(
        "-m", "pip", "install", "--quiet", "--no-index", "--force-reinstall", "--no-deps", str(wheel)
    )
    assert again.returncode == 0, again.stderr
    assert environment.run("-c", LOADED, MEGATRON_MTP_PATCHES="all").stdout == "True\n"
    gone = environment.run("-m", "pip", "uninstall", "--quiet", "--yes", "megatron-mtp-patches")
    assert gone.returncode == 0, gone.stderr
    assert set(environment.site.iterdir()) - before == {environment.site / FILE}
    for variables in ({}, {"MEGATRON_MTP_PATCHES": "all"}):
        done = environment.run("-c", LOADED, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


# -- where it is written, and where not ------------------------------------------------------------------------------


def test_what_only_python_path_finds_is_not_enabled(make_environment, installed):
    environment = make_environment()
    for folder in environment.site.glob("megatron_*"):
        shutil.rmtree(folder)
    done = environment.command("enable", PYTHONPATH=str(installed))
    assert (done.returncode, done.stdout, files(environment)) == (1, "", [])
    assert "is not installed in" in done.stderr and str(installed) in done.stderr
    # the metadata alone, which an uninstall by hand leaves
    metadata = next(installed.glob("*.dist-info"))
    shutil.copytree(metadata, environment.site / metadata.name, dirs_exist_ok=True)
    done = environment.command("enable", PYTHONPATH=str(installed))
    assert (done.returncode, done.stdout, files(environment)) == (1, "", [])


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(environment):
    (environment.site / FILE).mkdir()
    try:
        done = environment.command("enable")
    finally:
        (environment.site / FILE).rmdir()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {environment.site / FILE}: " in done.stderr and "Traceback" not in done.stderr


def test_installed_for_a_user_it_is_enabled_for_that_user(environment, installed, tmp_path):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "lib" / version / "site-packages"
    shutil.copytree(installed, site)
    base = type(environment)(Path(os.path.realpath(environment.python)), site)
    if base.run("-c", "import site; print(site.ENABLE_USER_SITE)", PYTHONUSERBASE=str(tmp_path)).stdout != "True\n":
        pytest.skip("this Python reads no folder of the user's")
    done = base.command("enable", PYTHONUSERBASE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert files(base) == [site / FILE]
    asked = {"MEGATRON_MTP_PATCHES": "all", "PYTHONUSERBASE": str(tmp_path)}
    assert base.run("-c", LOADED, **asked).stdout == "True\n"
    for word in ("-I", "-s"):  # a Python that leaves out what is the user's
        assert base.run(word, "-c", LOADED, **asked).stdout == "False\n"


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
    job.write_text(textwrap.dedent(JOB))
    # the environment's own Python, with the torch and the Megatron of the one that tests
    found = str(Path(importlib.util.find_spec("torch").origin).parents[1])
    done = enabled.run(
        *("-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "1", str(job)),
        PYTHONPATH=found,
        MEGATRON_MTP_PATCHES="all",
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
    )
    assert done.returncode == 0, done.stderr
    assert "patched: True worker: True" in done.stdout
