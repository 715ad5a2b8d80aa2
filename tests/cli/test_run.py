"""`run`: a script runs as `python SCRIPT` would run it."""

import json
import sys
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.cli.run import run_script
from megatron_mtp_patches.engine import UsageError

from tests.warm.processes import run_ranks

from .fresh_start import REPOSITORY, run_command, run_python, standard_library

pytestmark = pytest.mark.forked("python")

SHOW = """
import json, sys, beside
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.__file__]))
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").touch()
    return folder / "script.py"


@pytest.mark.real_process("how Python itself starts a script is what is compared")
def test_a_script_sees_what_python_would_show_it(script, tmp_path):
    script.write_text(SHOW)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    for started in (script, link):
        plain = run_python(str(started), "--flag", "1")
        ours = run_python("-m", "megatron_mtp_patches", "run", str(started), "--flag", "1")
        assert plain.returncode == 0, plain.stderr
        assert (ours.returncode, ours.stderr) == (0, "")
        assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.real_process("how Python itself starts a module is what is compared")
def test_a_module_sees_what_python_would_show_it(script, monkeypatch):
    script.write_text(SHOW)
    monkeypatch.chdir(script.parent)
    plain = run_python("-m", "script", "--flag", "1")
    ours = run_python("-m", "megatron_mtp_patches", "run", "-m", "script", "--flag", "1")
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    absent = run_python("-m", "megatron_mtp_patches", "run", "-m", "absent.module")
    assert absent.returncode == 2 and "no such module: absent.module" in absent.stderr


def test_the_exit_code_is_that_of_the_script_and_without_a_device_torch_is_left_alone(script):
    script.write_text("import sys; print('torch' in sys.modules); sys.exit(7)")
    (done,) = run_ranks(1, lambda: run_script(str(script), [], None))
    assert (done.code, done.output) == (7, "False\n")


def test_a_script_that_does_not_exist_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="no such script: .*absent.py") as error:
        run_script(str(tmp_path / "absent.py"), [], None)
    assert error.value.exit_code == 2


def test_device_cuda_without_a_gpu_is_wrong_usage(script, monkeypatch):
    script.touch()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 0)))
    with pytest.raises(UsageError, match="finds no GPU"):
        run_script(str(script), [], "cuda")


@pytest.mark.real_process("the line comes where Python ends, after the traceback")
def test_a_script_that_fails_without_a_gpu_is_told_of_the_rehearsal(script):
    (script.parent / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: COUNT)\n")
    script.write_text("import sys, torch\ntorch.COUNT = int(sys.argv[1])\nraise ValueError('it wants a GPU')")
    without, with_one = (
        run_python("-m", "megatron_mtp_patches", "run", str(script), count).stderr.splitlines()[-1]
        for count in ("0", "1")
    )
    assert (
        without
        == "megatron-mtp-patches: torch finds no GPU here; --device cpu, before the script, rehearses without one."
    )
    assert with_one == "ValueError: it wants a GPU"


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cpu", "megatron-mtp-patches: a rehearsal needs torch >= 2.11, and there is none in "),
        ("cuda", "megatron-mtp-patches: --device cuda needs torch, which does not import: No module named 'torch'"),
    ],
)
def test_a_device_without_torch_is_a_sentence(script, device, says):
    script.write_text("print('runs')")
    done = run_command(["run", "--device", device, str(script)], [*REPOSITORY, *standard_library()], {})
    assert (done.code, done.output.count("\n")) == (1, 1) and done.output.startswith(says), done.output


@pytest.mark.real_process("the line comes where Python ends")
@pytest.mark.parametrize("text", ["pass", "import no_such_module"])
def test_a_script_without_megatron_is_told_that_nothing_was_patched(script, text):
    script.write_text(f"import sys; sys.path[:] = {standard_library()}; {text}")
    done = run_python("-m", "megatron_mtp_patches", "run", str(script))
    assert done.stderr.splitlines()[-1].startswith(
        "megatron-mtp-patches: nothing was patched: megatron-core is not installed (pip install megatron-core"
    )


ASK_FOR_A_SIZE = """
import argparse
def validate_args(args):
    assert args.hidden_size is not None
    assert args.hidden_size > 0
validate_args(argparse.Namespace(hidden_size=SIZE))
"""


@pytest.mark.parametrize(
    "size, says",
    [("None", "AssertionError: Megatron refuses these flags: add --hidden-size"), ("0", "assert args.hidden_size > 0")],
)
def test_an_assertion_of_megatrons_flags_says_what_to_change(script, size, says):
    folder = script.parent / "megatron" / "training"
    folder.mkdir(parents=True)
    arguments = folder / "arguments.py"
    arguments.write_text(ASK_FOR_A_SIZE.replace("SIZE", size))
    script.write_text(f"import runpy; runpy.run_path({str(arguments)!r})")
    (done,) = run_ranks(1, lambda: run_script(str(script), [], None))
    assert done.code == 1 and done.output.splitlines()[-1].endswith(says)


def test_an_assertion_of_the_script_stays_as_it_is(script):
    script.write_text("assert False")
    (done,) = run_ranks(1, lambda: run_script(str(script), [], None))
    assert done.code == 1 and done.output.splitlines()[-1] == "AssertionError"


UNKNOWN = "import argparse; argparse.ArgumentParser().parse_args()"


@pytest.mark.parametrize("flags", [["--mtp-detach-heads"], ["--grad-norm-skip-threshold=50"]])
def test_a_flag_whose_patch_was_left_out_is_named(script, flags):
    script.write_text(UNKNOWN)
    path = [*REPOSITORY, *sys.path]
    for choice, is_named in (("none", True), ("all", False)):
        done = run_command(["run", str(script), *flags], path, {"MEGATRON_MTP_PATCHES": choice})
        assert done.code == 2 and "unrecognized arguments" in done.output
        assert ("which is left out by MEGATRON_MTP_PATCHES" in done.output) is is_named


def test_a_misspelt_flag_of_a_patch_is_named_with_what_may_be_meant(script):
    script.write_text(UNKNOWN)
    done = run_command(["run", str(script), "--mtp-clip-grads=0.1", "--my-flag"], [*REPOSITORY, *sys.path], {})
    assert done.code == 2 and "megatron-mtp-patches: --mtp-clip-grads: did you mean --mtp-clip-grad?\n" in done.output
    assert "--my-flag: did you mean" not in done.output
    assert "--device" not in done.output


def test_an_option_of_ours_after_the_script_is_named(script):
    script.write_text(UNKNOWN)
    (done,) = run_ranks(1, lambda: run_script(str(script), ["--device", "cpu"], None))
    assert done.code == 2 and "megatron-mtp-patches: --device goes before the name of the script\n" in done.output
