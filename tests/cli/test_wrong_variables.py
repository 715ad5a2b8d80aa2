"""A wrong value of a variable of ours is wrong usage of the command, and an error in any other process."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.cli import zero_touch
from megatron_mtp_patches.cli.parser import make_parser

from .fresh_start import run_python

pytestmark = pytest.mark.forked("python")

CHOICE = {"MEGATRON_MTP_PATCHES": "typo"}
ON_DRIFT = {"MEGATRON_MTP_PATCHES": "all", "MEGATRON_MTP_PATCHES_ON_DRIFT": "typo"}


@pytest.fixture
def script(tmp_path):
    """script(name, text): a Python file of that name."""

    def write(name: str, text: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize("variables", [CHOICE, ON_DRIFT], ids=["choice", "on drift"])
@pytest.mark.parametrize("name", ["status", "doctor", "drift", "run"])
def test_commands_that_apply_patches_report_it_in_one_line(forked_command, script, name, variables):
    arguments = [script("job.py", "print('trains')")] if name == "run" else []
    done = forked_command(name, *arguments, **variables)
    assert (done.code, done.output.count("\n")) == (2, 1), done.output
    assert done.output.startswith("megatron-mtp-patches: ") and "'typo'" in done.output


@pytest.mark.real_process("the package looks at how Python was started")
@pytest.mark.parametrize(
    "words", [["-m", "megatron_mtp_patches"], ["-mmegatron_mtp_patches"], ["installed"]], ids=" ".join
)
def test_the_command_reports_it_in_one_line_however_it_was_started(script, words):
    if words == ["installed"]:  # the script that pip makes of an entry point
        words = [
            script("megatron-mtp-patches", "import sys\nfrom megatron_mtp_patches.cli import main\nsys.exit(main())")
        ]
    done = run_python(*words, "status", **CHOICE)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("megatron-mtp-patches: ") and "'typo'" in done.stderr


@pytest.mark.real_process("the package looks at how Python was started")
@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import megatron_mtp_patches; print('trains')"],
        ["-c", "import megatron_mtp_patches; print('trains')", "-m", "megatron_mtp_patches"],
        ["job.py", "-m", "megatron_mtp_patches", "run"],
        ["-m", "job", "-m", "megatron_mtp_patches"],
        ["-m", "job", "megatron_mtp_patches"],
    ],
    ids=" ".join,
)
def test_any_other_process_fails_at_the_import(script, tmp_path, words):
    script("job/__init__.py", "import megatron_mtp_patches")  # while Python still looks for job.__main__
    script("job/__main__.py", "print('trains')")
    file = script("job.py", "import megatron_mtp_patches; print('trains')")
    done = run_python(*[file if word == "job.py" else word for word in words], first=tmp_path, **CHOICE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr and "PatchError: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["enable", "disable"])
def test_enable_and_disable_do_not_read_the_variables(name):
    """So zero-touch can be disabled with a wrong one, too; tests/packaging runs both."""
    assert make_parser().parse_args([name]).needs_patches is False


def test_disable_works_with_a_wrong_choice(command, monkeypatch, tmp_path):
    file = tmp_path / zero_touch.FILE
    file.touch()
    monkeypatch.setattr(zero_touch, "_site_folders", lambda: [tmp_path])
    megatron_mtp_patches.revert()  # as after an import that such a choice fails
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "typo")
    done = command("disable")
    assert (done.code, done.err) == (0, "")
    assert not file.exists()


def test_version_works_with_a_wrong_choice(forked_command):
    done = forked_command("--version", **CHOICE)
    assert (done.code, done.output.strip()) == (0, megatron_mtp_patches.__version__)
