"""ci/gpu/run.sh, rehearsed: every stage that needs no checkout comes about, and what ends badly is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("the lane starts an interpreter for each stage")]
ROOT = Path(__file__).resolve().parents[2]
SLEEPS = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
print(subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid, flush=True)
time.sleep(100)
"""


def lane(out, *arguments):
    """(exit code, what was said, the report)."""
    command = [ROOT / "ci/gpu/run.sh", "--out", out, *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    report = out / "report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.is_file() else None


@pytest.fixture
def load(monkeypatch):
    """load(name): a module of ci/gpu."""
    for folder in ("scripts", "scripts/bench", "ci/gpu"):
        monkeypatch.syspath_prepend(str(ROOT / folder))

    def module(name):
        return __import__(name)

    return module


def test_every_stage_comes_about(tmp_path):
    names = ("tests", "acceptance", "memory", "muon", "replay", "training")  # scripts/check_tables.py measures a step
    code, said, report = lane(tmp_path, "--device", "cpu", *(f"--only={name}*" for name in names))
    states = {stage["stage"].split()[0]: stage["state"] for stage in report["stages"]}
    fused_adam = "passed" if find_spec("transformer_engine") else "not run"
    expected = ("passed", "passed", fused_adam, "passed", "not run", "not run")
    assert states == dict(zip(names, expected, strict=True)), said
    assert code == 0
    figures = {figure["what"]: figure for stage in report["stages"] for figure in stage["figures"]}
    assert figures["own tests that fail"]["value"] == "0 of 11"
    assert figures["training step, all flags / unpatched"]["value"] == "not run"
    assert {figure["met"] for figure in figures.values()} == {None}
    text = (tmp_path / "report.md").read_text()
    assert "| replay | not run |  | no checkout given |" in text and "a CPU (rehearsal" in text


def test_a_stage_that_has_ended_is_kept_for_its_device(load, tmp_path):
    lane, stages = load("lane"), load("stages")
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('.'); exit('no way')"
    stage = stages.Stage("one stage", [sys.executable, "-c", code], lambda folder, device: [])

    def run(device, resume):
        record = lane.run(stage, SimpleNamespace(out=tmp_path, device=device, resume=resume))
        return record["state"], record["reason"], len((tmp_path / "ran").read_text())

    failed = ("failed", "stages/one-stage/log: no way")
    assert run("cpu", True) == (*failed, 1)
    assert run("cpu", True) == (*failed, 1)
    assert run("gpu", True) == (*failed, 2)
    assert run("gpu", False) == (*failed, 3)


def test_without_a_gpu_nothing_is_run(tmp_path):
    (tmp_path / "doc.md").write_text("before\n<!-- made by ci/gpu/run.sh --doc: results -->\n<!-- end -->\nafter\n")
    code, said, report = lane(tmp_path, "--device", "gpu", "--doc", tmp_path / "doc.md")
    if "torch finds no GPU here" not in said:
        pytest.skip("there is a GPU")
    assert code == 1
    assert {stage["state"] for stage in report["stages"]} == {"not run"}
    text = (tmp_path / "doc.md").read_text()
    assert text.startswith("before\n<!-- made by") and text.endswith("<!-- end -->\nafter\n")
    assert "| optimizer.step, patched / native 0.19.2, worst row | step | not run | &lt;= 1.00 | not run |" in text
    once = text
    lane(tmp_path, "--device", "gpu", "--doc", tmp_path / "doc.md")
    assert (tmp_path / "doc.md").read_text() == once


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "muons"], "no stage is muons. There are: tests"),
        (["--wheels", "nowhere"], "nowhere: no such folder"),
        (["--wheels", "."], "no wheel of megatron-core is in it"),
        (["--megatron", "."], "neither a git repository nor a folder of Megatron-LM trees"),
        (["--python", "0.18.2"], "'0.18.2' is not RELEASE=PYTHON"),
        (["--python", "0.18.2=nowhere"], "--python: nowhere: no such Python"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, output, _ = lane(tmp_path / "out", "--device", "cpu", *arguments)
    assert code == 2 and said in " ".join(output.split())


def test_a_command_past_its_limit_ends_with_all_that_it_started(load, tmp_path):
    process, log = load("process"), tmp_path / "log"
    assert process.run([sys.executable, "-c", SLEEPS], dict(os.environ), log, 3.0) is None
    child = Path("/proc", log.read_text().strip(), "cmdline")
    until = time.monotonic() + 10
    while child.exists() and child.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    assert not (child.exists() and child.read_text())
    assert process.run([sys.executable, "-c", "exit(3)"], dict(os.environ), log, 60.0) == 3


def test_figures_are_held_against_their_targets(load, tmp_path):
    figures = load("figures")

    def write(name, found):
        (tmp_path / name).write_text(json.dumps(found))

    runs = {"unpatched": {"ms": 100.0, "peak MB": 10}, "patched": {"ms": 100.5, "peak MB": 10}}
    runs["patched, all flags"] = {"ms": 101.5, "peak MB": 11}
    write("training.json", {"runs": runs})
    found = [(figure.value, figure.met) for figure in figures.training(tmp_path, "gpu")]
    assert found == [("1.015", False), ("1.005", True), ("not run", None), ("not run", None), ("1.100", True)]

    def row(ratio, all_reduces):
        counts = {"all_reduces": all_reduces, "rank sets": 1, "host_syncs": 3, "launches": None}
        return {
            "patched / native": {"median": ratio},
            "a step": {"patched": counts, "native 0.19.2": {**counts, "host_syncs": 4}},
        }

    write("gpu.json", {"step": [row(0.8, 1), row(1.02, 2)], "acceptance": [{"ratio": 1.4}]})
    found = [(figure.value, figure.met) for figure in figures.step(tmp_path, "gpu")]
    assert found == [("1.020", False), ("2", False), ("0.750", True), ("not run", None)]
    assert [(figure.value, figure.met) for figure in figures.acceptance(tmp_path, "gpu")] == [("1.400", True)]

    before, after = ({"held": {"optimizer_state": held}, "saves": {"optimizer_state": 100}} for held in (300, 203))
    write("memory.json", {"fsdp-without-master-weights": {"without": [before], "with": [after]}})
    assert [(figure.value, figure.met) for figure in figures.memory(tmp_path, "gpu")] == [("0.970", False)]

    (tmp_path / "log").write_text("...\n2 failed, 40 passed, 3 skipped, 1 error in 3.20s\n")
    assert [(figure.value, figure.met) for figure in figures.suites(tmp_path, "gpu")] == [("3 of 43", False)]

    (tmp_path / "gpu").mkdir()
    write("gpu/0.18.2.json", {"totals": {"1": {"newly failing": 1, "still passing": 0}, "2": {"still passing": 1}}})
    assert [(figure.value, figure.met) for figure in figures.replay(tmp_path, "gpu")] == [("1 of 2", False)]

    losses = {"Muon, unpatched": {"1e+14": 0.98}, "Muon, exempt from clipping": {"1e+14": 0.02}}
    write("muon.json", {"losses": losses})
    assert [figure.met for figure in figures.muon(tmp_path, "gpu")] == [True, False]


def test_releases_come_from_the_wheels_in_their_order(load, tmp_path):
    for name in (
        "megatron_core-0.19.2-cp312-cp312-linux_x86_64.whl",
        "megatron_core-0.9.0-py3-none-any.whl",
        "rich-1.whl",
    ):
        (tmp_path / name).touch()
    assert load("environments").releases_in(tmp_path) == ["0.9.0", "0.19.2"]
