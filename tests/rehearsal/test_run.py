"""run_script: a script runs as `python SCRIPT` would run it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.cli.run import run_script
from megatron_mtp_patches.engine import UsageError

from .conftest import clean_environment

LAUNCH = "import json, sys; from megatron_mtp_patches.cli.run import run_script; run_script(*json.loads(sys.argv[1]))"
SHOW = """
import json, sys, beside
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.__file__]))
"""
PARSE = """
import os, sys, torch
from megatron.training.initialize import initialize
args = initialize()
print("RESULT", torch.zeros(1, device="cuda").device, args.transformer_impl, args.num_workers, args.validated)
sys.argv[1:] = ["--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"]
initialize()
"""
ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--fp8-format", dest="fp8")
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
def validate_args(args):
    args.validated = True
    return args
"""
INITIALIZE = """
from .arguments import parse_args, validate_args
def initialize():
    return validate_args(parse_args())
"""


def launch(script, arguments=(), device=None, **environment):
    command = [sys.executable, "-c", LAUNCH, json.dumps([str(script), list(arguments), device])]
    return subprocess.run(command, text=True, capture_output=True, env=clean_environment(**environment))


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "script.py").write_text(SHOW)
    return folder / "script.py"


@pytest.fixture
def megatron_script(script):
    """A script beside a checkout of something that looks like Megatron, by-name copies included."""
    package = script.parent / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # else the regular package of an installed megatron-core comes first
    (package / "arguments.py").write_text(ARGUMENTS)
    (package / "initialize.py").write_text(INITIALIZE)
    script.write_text(PARSE)
    return script


def test_as_python_would(script, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(script)
    for started in (script, link):
        plain = subprocess.run([sys.executable, started, "--flag", "1"], text=True, capture_output=True, check=True)
        ours = launch(started, ["--flag", "1"])
        assert json.loads(ours.stdout) == json.loads(plain.stdout), ours.stderr


def test_no_device_leaves_torch_alone(script):
    script.write_text("import sys; print('torch' in sys.modules)")
    assert launch(script).stdout == "False\n"


def test_a_process_group_that_the_script_leaves_open_is_closed(script):
    script.write_text(
        "import atexit, torch.distributed as dist; dist.init_process_group('nccl');"
        "atexit.register(lambda: print('open' if dist.is_initialized() else 'closed'))"
    )
    done = launch(script, [], "cpu")
    assert done.stdout == "closed\n", done.stderr


def test_the_scripts_exit_code_stands(script):
    script.write_text("import sys; sys.exit(7)")
    assert launch(script).returncode == 7


def test_no_such_script(tmp_path):
    with pytest.raises(UsageError, match="no such script: .*absent.py") as error:
        run_script(str(tmp_path / "absent.py"), [], None)
    assert error.value.exit_code == 2


def test_cuda_without_a_gpu(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 0)))
    with pytest.raises(UsageError, match="finds no GPU"):
        run_script(str(script), [], "cuda")


def test_on_the_cpu_with_cpu_defaults_and_refusals_by_name(megatron_script):
    done = launch(megatron_script, ["--num-workers", "3"], "cpu")
    assert "RESULT cpu local 3 True" in done.stdout, done.stderr
    assert done.stdout.count("rehearsal on the CPU over gloo: transformer_impl=local\n") == 1
    assert "RehearsalRefusal" in done.stderr
    assert "--transformer-impl transformer_engine: " in done.stderr
    assert "--fp8-format hybrid: fp8 needs a GPU" in done.stderr


def test_a_revert_puts_megatron_s_flags_back_and_the_next_apply_the_cpu_s(megatron_script):
    megatron_script.write_text(
        "import megatron_mtp_patches\n"
        "from megatron.training.initialize import initialize\n"
        "for step in (int, megatron_mtp_patches.revert, megatron_mtp_patches.apply):\n"
        "    step()\n"
        "    print('RESULT', initialize().transformer_impl)\n"
    )
    done = launch(megatron_script, [], "cpu")
    line = "rehearsal on the CPU over gloo: transformer_impl=local, num_workers=0\n"
    on_the_cpu = f"{line}RESULT local\n"
    assert done.stdout == f"{on_the_cpu}RESULT transformer_engine\n{on_the_cpu}", done.stderr
