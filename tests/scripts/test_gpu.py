"""scripts/gpu.py: its stages are commands that their scripts understand, and one that has passed is not run again."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

from scripts import gpu
from scripts.bench import __main__ as bench

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("a stage is an interpreter")]


@pytest.fixture
def run_stage(tmp_path):
    """run_stage(code): (what a stage that runs this returns, its recorded state, how often one was started)."""

    def run(code, minutes=1.0):
        started = tmp_path / "started"
        stage = gpu.Stage("one", [sys.executable, "-c", f"open({str(started)!r}, 'a').write('.'); {code}"])
        good = gpu.run_stages([stage], gpu.Record(tmp_path / "cpu.json", "a CPU"), minutes)
        state = json.loads((tmp_path / "cpu.json").read_text())["stages"]["one"]["state"]
        return good, state, len(started.read_text())

    return run


@pytest.fixture
def make_checkout(tmp_path):
    def make(version):
        file = tmp_path / version / "megatron" / "core" / "package_info.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"__version__ = {version!r}\n")
        return tmp_path / version

    return make


def test_a_stage_runs_until_it_has_passed(run_stage, tmp_path, capsys):
    assert run_stage("exit('no way')") == (False, "failed", 1)
    assert "no way\none: failed" in capsys.readouterr().out
    assert run_stage("exit('no way')") == (False, "failed", 2)
    assert (tmp_path / "one.log").read_text() == "no way\n"
    assert run_stage("import time; time.sleep(1000)", minutes=0.02) == (False, "ran out of time", 3)
    assert run_stage("print('done')") == (True, "passed", 4)
    assert run_stage("print('done')") == (True, "passed", 4)
    text = (tmp_path / "cpu.md").read_text()
    assert text.startswith("# Stages on a CPU\n") and "| one | passed | " in text
    assert f"pytest {pytest.__version__}" in text


def test_checkouts_of_other_releases_are_only_compared_with(make_checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.metadata, "version", lambda package: "0.18.2")
    checkouts = [make_checkout("0.18.0"), make_checkout("0.19.0")]
    options = Namespace(device="gpu", out=tmp_path, megatron=checkouts, minutes=30)
    commands = {stage.name: stage.command for stage in gpu.stages_of_release(options)}
    assert [*commands] == ["tests 0.18.2", "replay 0.18.0", "training 0.18.0"]
    command = commands["training 0.18.0"]
    assert command[command.index("--checkout") + 1] == str(checkouts[0])
    assert command[command.index("--native") + 1] == str(checkouts[1])


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_scripts_understand_the_commands_of_the_stages(device, make_checkout, monkeypatch, tmp_path):
    release = gpu.metadata.version("megatron-core")
    options = Namespace(device=device, out=tmp_path, megatron=[make_checkout(release)], minutes=30)
    options.python = {release: sys.executable}
    understood = []
    for module in bench.COMMANDS.values():
        monkeypatch.setattr(module, "run", understood.append)
    stages = [*gpu.stages_of_release(options), *gpu.stages_together(options)]
    commands = [stage.command for stage in stages if "scripts.bench" in stage.command]
    for command in commands:
        monkeypatch.setattr(sys, "argv", command[2:])
        bench.main()
    assert len(understood) == len(commands) == 3


def test_without_a_gpu_nothing_is_run(monkeypatch, refused, tmp_path):
    monkeypatch.setattr(gpu, "name_machine", lambda device: "")
    said = refused(gpu.main, "release", "--out", tmp_path / "out")
    assert "torch finds no GPU here; --device cpu rehearses the stages" in said
    assert not (tmp_path / "out").exists()
