"""Wrong usage exits with 2 and says what is right."""

import signal
import sys

import pytest
from megatron_mtp_patches.cli import CANNOT_RUN, main
from megatron_mtp_patches.engine import UsageError

pytestmark = pytest.mark.forked("python")


@pytest.mark.parametrize(
    "words, part",
    [
        ([], "required: command"),
        (["stauts"], "invalid choice: 'stauts'"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["doctor", "--num-layers", "4"], "the flags of a training go after `--`"),
        (["doctor", "--world-size", "two", "--", "--num-layers"], "invalid int value: 'two'"),
        (["reproduce", "--standalone", "x.py"], "one of the arguments ID --all is required"),
        (["reproduce", "ML-5338", "--json", "--standalone", "x.py"], "not allowed with argument --json"),
        (["run", "--device", "tpu", "x.py"], "invalid choice: 'tpu'"),
    ],
    ids=" ".join,
)
def test_wrong_usage_says_what_is_wrong(capsys, words, part):
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert "usage: megatron-mtp-patches" in printed.err and part in printed.err


@pytest.mark.parametrize(
    "name, hint",
    [
        ("no-such-patch", ""),
        ("Detach-mtp-head", " (did you mean detach-mtp-heads?)"),
        ("gptmodel.postprocess", " (did you mean GPTModel._postprocess?)"),
    ],
)
def test_a_name_that_is_neither_a_patch_nor_a_function_says_what_lists_both(capsys, name, hint):
    assert main(["explain", name]) == 2
    printed = capsys.readouterr().err
    assert (
        f"{name!r}{hint}: no patch or known defect has this id, and no patch changes a function of this name" in printed
    )
    assert "`megatron-mtp-patches status` lists the patches" in printed


def test_a_report_is_about_one_defect(capsys):
    assert main(["reproduce", "--all", "--report"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "give its ID in place of --all" in printed.err


@pytest.mark.parametrize(
    "identifier, file, part",
    [
        ("--all", "new.py", "give its ID in place of --all"),
        ("ML-1", "new.py", "'ML-1' is not the id of a known defect"),
        (
            "ML-3693",
            "new.py",
            "there is no program for ML-3693: a CPU cannot show it, or none is written yet. It was re",
        ),
        ("ML-5338", "old.py", "old.py exists already"),
        ("ML-5338", ".", ". is a folder: give the name of a file"),
        ("ML-5338", "folder/new.py", "there is no folder folder: create it"),
        ("ML-3673", "n" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_standalone_file_that_cannot_be_written_is_refused(capsys, tmp_path, monkeypatch, identifier, file, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text("old")
    assert main(["reproduce", identifier, "--standalone", file]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and part in printed.err
    assert [one.name for one in tmp_path.iterdir()] == ["old.py"] and (tmp_path / "old.py").read_text() == "old"


def test_help_names_every_command_and_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    commands = ("status", "explain", "run", "verify-mtp", "doctor", "drift", "enable", "disable")
    assert all(f"\n    {name} " in printed for name in commands)
    assert all(f"\n  {code:<3}  " in printed for code in (0, 1, UsageError.exit_code, CANNOT_RUN, 128 + signal.SIGPIPE))


@pytest.mark.parametrize(("text", "code"), [("pass", 0), ("import sys; sys.exit()", 0), ("import sys; sys.exit(2)", 2)])
def test_verify_mtp_exits_with_1_if_the_script_ends_before_a_training_step(forked_command, tmp_path, text, code):
    script = tmp_path / "job.py"
    script.write_text(text)
    done = forked_command("verify-mtp", str(script))
    assert done.code == 1
    assert f"job.py ended (exit code {code}) without a training step" in done.output


@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_checkout_is_found_from_its_folder(is_checkout, tmp_path, monkeypatch):
    """As by `python -m`: a script of the environment does not have its working directory on the path."""
    (tmp_path / "megatron" / ("core" if is_checkout else "data")).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    with pytest.raises(SystemExit):
        main(["--version"])
    assert (str(tmp_path) in sys.path) is is_checkout
