"""Wrong usage is 2 and says what is right."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "required: command"),
        (["stauts"], "invalid choice: 'stauts'"),
        (["status", "--jsno"], "unrecognized arguments: --jsno"),
        (["explain"], "required: ID"),
        (["explain", "no-such-patch"], "invalid choice: 'no-such-patch'"),
        (["drift", "--against"], "expected one argument"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["run"], "required: SCRIPT"),
        (["run", "--device", "tpu", "x.py"], "invalid choice: 'tpu'"),
    ],
    ids=" ".join,
)
def test_wrong_usage(capsys, words, part):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert "usage: megatron-mtp-patches" in printed.err and part in printed.err


def test_an_unknown_id_lists_the_ids(capsys):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit):
        main(["explain", "no-such-patch"])
    printed = capsys.readouterr().err
    assert all(patch.id in printed for patch in CATALOG)


def test_version(capsys):
    from megatron_mtp_patches.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == megatron_mtp_patches.__version__


def test_help_names_every_command(command):
    done = command("--help")
    assert done.returncode == 0
    commands = ("status", "explain", "run", "verify-mtp", "doctor", "drift", "enable", "disable")
    assert all(f"\n    {name} " in done.stdout for name in commands)


WRONG = [{"MEGATRON_MTP_PATCHES": "typo"}, {"MEGATRON_MTP_PATCHES": "all", "MEGATRON_MTP_PATCHES_ON_DRIFT": "typo"}]


@pytest.fixture
def script(tmp_path):
    """script(name, text): a Python file of that name."""

    def write(name: str, text: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize("variables", WRONG, ids=["choice", "on drift"])
@pytest.mark.parametrize(
    "words", [["-m", "megatron_mtp_patches"], ["-mmegatron_mtp_patches"], ["installed"]], ids=" ".join
)
@pytest.mark.parametrize("command", ["status", "doctor", "drift", "run"])
def test_a_wrong_variable_is_wrong_usage(python, script, words, variables, command):
    if words == ["installed"]:  # the script that pip makes of an entry point
        words = [
            script("megatron-mtp-patches", "import sys\nfrom megatron_mtp_patches.cli import main\nsys.exit(main())")
        ]
    arguments = [script("job.py", "print('trains')")] if command == "run" else []
    done = python(*words, command, *arguments, **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("megatron-mtp-patches: ") and "'typo'" in done.stderr


@pytest.mark.parametrize("name", ["enable", "disable"])
def test_zero_touch_does_not_ask_what_the_variable_says(name):
    """It is off with a wrong one, too; tests/packaging runs both."""
    from megatron_mtp_patches.cli import make_parser

    assert make_parser().parse_args([name]).needs_set is False


def test_a_wrong_variable_does_not_keep_zero_touch_on(command):
    done = command("disable", MEGATRON_MTP_PATCHES="typo")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("text", "code"), [("pass", 0), ("import sys; sys.exit()", 0), ("import sys; sys.exit(2)", 2)])
def test_a_script_that_ends_before_a_step_is_not_verified(command, script, text, code):
    done = command("verify-mtp", script("job.py", text))
    assert done.returncode == 1
    assert f"job.py ended (exit code {code}) without a training step" in done.stderr


def test_a_wrong_variable_does_not_hide_the_version(command):
    done = command("--version", MEGATRON_MTP_PATCHES="typo")
    assert (done.returncode, done.stdout.strip()) == (0, megatron_mtp_patches.__version__)


@pytest.mark.parametrize("variables", WRONG, ids=["choice", "on drift"])
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
def test_a_wrong_variable_fails_the_import_of_any_other_process(python, script, tmp_path, words, variables):
    script("job/__init__.py", "import megatron_mtp_patches")  # while Python still looks for job.__main__
    script("job/__main__.py", "print('trains')")
    file = script("job.py", "import megatron_mtp_patches; print('trains')")
    done = python(*[file if word == "job.py" else word for word in words], first=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr and "PatchError: " in done.stderr.splitlines()[-1]
