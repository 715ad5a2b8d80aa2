"""python -m scripts.gpu: packed, rehearsed on a CPU and taken; no stage takes another along."""

import json
import re
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from math import nan
from pathlib import Path

import pytest
from megatron_mtp_patches.megatrons.known import DEFAULT

from scripts.bench import __main__ as bench
from scripts.common.process import environment
from scripts.gpu import __main__ as gpu
from scripts.gpu import machine, packing, pages, running, stages
from scripts.gpu.machine import TAGS, Installed
from scripts.gpu.stages import COMMANDS, Stage
from scripts.replay import __main__ as replay

pytestmark = [pytest.mark.forked("python"), pytest.mark.real_process("a stage is an interpreter")]
MOST_FILES, LARGEST, NAME = 8, 16 * 2**20, re.compile(r"[\w.-]+")  # of what a lent machine brings back


PRETRAIN = """
import torch
from scripts.demo import dataset, trainer

class Samples(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return 100
    def __getitem__(self, number):
        tokens = torch.arange(number, number + self.length + 1) % 100
        mask, positions = torch.ones(self.length), torch.arange(self.length)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}

dataset.build = lambda args, tokenizer, sizes: [Samples(args.seq_length)] * 3
trainer.main()
"""


@pytest.fixture
def packed(tmp_path):
    """A folder as `pack` writes it, with the installed Megatron as a tree whose pretrain_gpt.py is PRETRAIN."""
    (wheel,) = (file for file in metadata.files("megatron-core") if str(file) == "megatron/core/package_info.py")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(PRETRAIN)
    folder = tmp_path / "packed"
    folder.mkdir()
    tree = f"{TAGS[DEFAULT]}.tar.gz"
    with tarfile.open(folder / tree, "w:gz", compresslevel=1) as tar:
        tar.add(Path(wheel.locate()).parents[1], f"{TAGS[DEFAULT]}/megatron")
        tar.add(script, f"{TAGS[DEFAULT]}/pretrain_gpt.py")
    (folder / machine.LIST).write_text(json.dumps({tree: {"sha256": machine.checksum(folder / tree)}}))
    return folder


@pytest.mark.skipif(metadata.version("megatron-core") != DEFAULT, reason=f"stages are of {DEFAULT}")
def test_the_first_command_is_rehearsed(packed, tmp_path):
    words = ["-m", "scripts.gpu", "run", "--first", str(packed), str(tmp_path / "out"), "--device", "cpu"]
    done = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = list((tmp_path / "out").rglob("*"))
    assert {file.name for file in files} == {"first.json", "first.log"} and len(files) <= MOST_FILES
    assert all(file.stat().st_size < LARGEST and NAME.fullmatch(file.name) for file in files)
    stages_run = json.loads((tmp_path / "out" / "first.json").read_text())["stages"]
    names = ["install", "status", f"conformance {DEFAULT}"]
    trainings = [f"training {DEFAULT}, {patches}" for patches in ("unpatched", "repairs")]
    assert [*stages_run] == [*names, *trainings] and {one["state"] for one in stages_run.values()} == {"passed"}
    assert stages_run[f"conformance {DEFAULT}"]["result"]["counts"]["passed"] > 0
    runs = [stages_run[name]["result"] for name in trainings]
    assert [run["patches"] for run in runs] == ["none", "repairs"]
    assert [len(run["steps"]) for run in runs] == [4, 4]
    numbers = [[(step["loss"], step["heads"], step["norm"]) for step in run["steps"]] for run in runs]
    assert numbers[0] == numbers[1] and all(norm > 0 and heads for _, heads, norm in numbers[0])


def test_no_stage_takes_another_along(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(running, "LEAST", 0)
    outcomes = running.Outcomes(tmp_path / "first.json", "a GPU")
    write = f"open({str(tmp_path / 'half')!r}, 'w').write('[1]'); "
    programs = {
        "dies": "import os; os.abort()",
        "hangs": f"{write}import time; print('now', flush=True); time.sleep(1000)",
        "writes half": f"open({str(tmp_path / 'bad')!r}, 'w').write('[1, '); exit('no way')",
        "passes": "print('done')",
    }
    files = {"hangs": tmp_path / "half", "writes half": tmp_path / "bad"}
    until = time.monotonic() + 1000
    for name, program in programs.items():
        limit = 2 if name == "hangs" else 100
        stage = Stage(name, limit, [sys.executable, "-c", program], result=files.get(name))
        running.run_stage(stage, until, outcomes)
    running.run_stage(Stage("lacks", 100, lacks="no wheel of it"), until, outcomes)
    monkeypatch.setattr(running, "LEAST", 10)
    running.run_stage(Stage("is late", 100, [sys.executable, "-c", "exit(1)"]), time.monotonic() + 9, outcomes)
    assert json.loads((tmp_path / "first.json").read_text())["stages"] == outcomes.stages
    assert {name: one["state"] for name, one in outcomes.stages.items()} == {
        "dies": "failed with exit code -6",
        "hangs": "ended after 2 s",
        "writes half": "failed with exit code 1",
        "passes": "passed",
        "lacks": "left out: no wheel of it",
        "is late": "left out: time is up",
    }
    assert outcomes.stages["hangs"]["result"] == [1] and outcomes.stages["writes half"]["result"] is None
    assert "=== hangs\nnow\n" in (tmp_path / "first.log").read_text()
    assert "no way\nwrites half: failed" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_scripts_understand_the_commands_of_the_stages(device, monkeypatch, tmp_path):
    installed = Installed(dict.fromkeys(TAGS, sys.executable), {tag: tmp_path / tag for tag in TAGS.values()})
    understood = []
    for module in bench.COMMANDS.values():
        monkeypatch.setattr(module, "run", understood.append)
    monkeypatch.setattr(replay, "replay_release", lambda *parts: understood.append(parts) or 0)
    file = tmp_path / TAGS[DEFAULT] / "megatron" / "core" / "package_info.py"
    file.parent.mkdir(parents=True)
    file.write_text("MAJOR, MINOR, PATCH = 0, 18, 2\nMAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    mains = {"scripts.bench": bench.main, "scripts.replay": replay.main}
    commands = [
        stage.command for one in COMMANDS.values() for stage in one.stages(installed, device, tmp_path) if stage.command
    ]
    for _, _, module, *words in commands:
        if module in mains:
            monkeypatch.setattr(sys, "argv", [module, *words])
            mains[module]()
    assert len(understood) == 3
    release, _, options = understood[0]
    assert release == "0.18.2" and len(options.file) == (stages.FEW if device == "cpu" else len(set(options.file)))
    assert {*stages.ROUTERS} <= {*options.file} and len(options.file) < 30


def test_what_was_not_carried_is_left_out_by_name(tmp_path):
    installed = Installed({DEFAULT: sys.executable}, {})
    lacking = {stage.name: stage.lacks for stage in COMMANDS["rest"].stages(installed, "gpu", tmp_path)}
    assert lacking["step"] == "no wheel of megatron-core 0.19.2"
    assert lacking["upstream's tests"] == f"no {TAGS[DEFAULT]}.tar.gz"
    assert lacking["acceptance"] == lacking["reproductions"] == ""


@pytest.fixture
def clone(write_tree, tmp_path):
    """A git repository with the tags that are packed."""
    folder = tmp_path / "clone"
    git = ["git", "-C", folder, "-c", "user.name=N", "-c", "user.email=e"]
    suites = [suite for suite in replay.SETTINGS["suite"] if suite["name"] in stages.SUITES and "ref" in suite]
    for number, tag in enumerate(TAGS.values()):
        write_tree(folder, **{file.removesuffix(".py"): f"# {tag}" for suite in suites for file in suite["files"]})
        (folder / "tests/functional_tests").mkdir(exist_ok=True)
        (folder / "tests/functional_tests/golden.json").write_text("{}")
        for words in ([["init", "-q"]] if not number else []) + [["add", "-A"], ["commit", "-qm", tag], ["tag", tag]]:
            subprocess.run([*git, *words], check=True)
    return folder


def test_what_is_packed(clone, tmp_path, monkeypatch, capsys, ended):
    wheel = "megatron_core-0.18.2-any.whl"
    monkeypatch.setattr(packing, "download", lambda folder: (folder / wheel).write_bytes(b"wheel"))
    folder = tmp_path / "packed"
    packing.pack(folder, str(clone))
    files = {file.name for file in folder.iterdir()} - {machine.LIST}
    assert files == {f"{tag}.tar.gz" for tag in TAGS.values()} | {wheel}
    listed = json.loads((folder / machine.LIST).read_text())
    assert {name: row["bytes"] for name, row in listed.items()} == {
        name: (folder / name).stat().st_size for name in files
    }
    assert f"5  {wheel}" in capsys.readouterr().out
    with tarfile.open(folder / f"{TAGS[DEFAULT]}.tar.gz") as tar:
        tests = f"{TAGS[DEFAULT]}/tests/unit_tests/test_optimizer"
        names = tar.getnames()
        assert tar.extractfile(f"{tests}.py").read() == b"# core_v0.18.2"
        assert tar.extractfile(f"{tests}_of_core_v0_19_0.py").read() == b"# core_v0.19.0"
    assert not [name for name in names if "functional_tests" in name]
    monkeypatch.setattr(packing, "LIMIT", 10)
    assert "more than the 10 that may be carried" in ended(gpu.main, "pack", folder, "--megatron", clone)


@pytest.fixture
def ended(monkeypatch):
    """ended(main, *words): the message with which a script ends."""

    def run(main, *words):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        with pytest.raises(SystemExit) as error:
            main()
        return str(error.value)

    return run


def test_what_cannot_be_run(packed, tmp_path, monkeypatch, ended):
    words = ["run", "--first", packed, tmp_path / "out"]
    monkeypatch.setattr(machine, "NAME_GPU", "raise OSError('driver too old')")
    said = "torch finds no GPU here (OSError: driver too old); --device cpu rehearses the stages"
    assert said in ended(gpu.main, *words)
    words += ["--device", "cpu"]
    monkeypatch.setattr(running, "lacking", lambda: ["einops"])
    assert "this Python lacks einops: install them with pip" in ended(gpu.main, *words)
    monkeypatch.undo()
    monkeypatch.setattr(running, "WORK", tmp_path / "work")
    (packed / f"{TAGS[DEFAULT]}.tar.gz").write_bytes(b"cut")
    assert f"{TAGS[DEFAULT]}.tar.gz is missing or not what its packed.json says" in ended(gpu.main, *words)
    (packed / machine.LIST).write_text("{")
    assert "write it with `python -m scripts.gpu pack" in ended(gpu.main, *words)
    assert "packed.json is a file: give a folder" in ended(gpu.main, *words[:3], packed / machine.LIST, *words[4:])


def training(losses, patches, ms):
    steps = [{"ms": ms, "loss": loss, "heads": [loss], "norm": 1.0} for loss in losses]
    return {"flags": "--bf16", "patches": patches, "peak bytes": 2**30, "steps": steps}


def stage(result=None, state="passed"):
    return {"state": state, "seconds": 1.0, "result": result}


UPSTREAM = {"totals": {"1": {"still passing": 3, "newly failing": 2}}, "causes of the rest": {"1": {}}}
FIRST = {
    "install": {"state": "passed", "seconds": 1, "versions": {"torch": "2.11.0"}},
    "status": stage(),
    "training 0.18.2, unpatched": stage(training([3.0, 2.0], "none", 10.0)),
    "training 0.18.2, repairs": stage(training([3.0, 2.0], "repairs", 11.0)),
    "conformance 0.18.2": stage({"counts": {"passed": 5, "failure": 1}, "failures": {}}, "failed with exit code 1"),
}
REST = {
    "install": {"state": "passed", "seconds": 1, "versions": {"torch": "2.11.0"}},
    "status": {"state": "left out: time is up", "seconds": 0},
    "training 0.18.2, unpatched, again": stage(training([3.0, 2.002], "none", 10.0)),
    "upstream's tests": stage(UPSTREAM),
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """results(machine, **commands): the folder with these results, and ci/gpu in a temporary folder."""
    monkeypatch.setattr(pages, "KEPT", tmp_path / "ci" / "gpu.json")

    def write(name, **commands):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        for command, outcomes in commands.items():
            (folder / f"{command}.json").write_text(json.dumps({"machine": name, "stages": outcomes}))
        return folder

    return write


def test_what_was_seen_is_taken_whatever_it_was(results):
    assert "**Nothing has been run on a GPU yet**" in pages.sentence(pages.read_kept(), "docs/", "ci/")
    pages.take([results("a GPU of 1 GiB", first=FIRST, rest=REST)])
    text = pages.KEPT.with_suffix(".md").read_text()
    assert "Not installed: TransformerEngine and Apex. Made by" in text and "a GPU of 1 GiB: torch 2.11.0" in text
    assert "| status | passed | 1 |  |" in text  # it ran once and was left out the other time
    assert "| conformance 0.18.2 | failed with exit code 1 | 1 | 5 passed, 1 failure |" in text
    equal = "0.0e+00 | 0.0e+00 | 0.0e+00 | none: the bits are equal |"
    assert f"| repairs | 2 | 11.0 | 1.100 | 1.00 | {equal}" in text
    assert "| unpatched, again | 2 | 10.0 | 1.000 | 1.00 | 1.0e-03 | 1.0e-03 | 0.0e+00 | 2 |" in text
    assert "| 2 | 2.0, 1.0 | 2.0, 1.0 | 2.002, 1.0 |" in text
    said = pages.sentence(pages.read_kept(), "docs/", "ci/")
    assert "On one GPU (a GPU of 1 GiB; no second rank) 6 of 7 stages passed; a step of 0.18.2 with the repairs" in said
    assert "took 1.100 of its time without, and its losses differed by at most 0e+00 in 2 steps" in said
    assert "2 of upstream's tests newly failed" in said
    broken = stage(training([3.0, nan], "repairs", 11.0), "ended after 75 s")
    pages.take([results("a GPU of 1 GiB", first={**FIRST, "training 0.18.2, repairs": broken})])
    text = pages.KEPT.with_suffix(".md").read_text()
    assert "| repairs | 2, ended after 75 s | 11.0 | 1.100 | 1.00 | not finite | not finite | 0.0e+00 | 2 |" in text
    assert "its losses were not all finite in 2 steps" in pages.sentence(pages.read_kept(), "docs/", "ci/")


def test_what_is_no_evidence(results, ended, tmp_path):
    assert "is of a rehearsal on a CPU" in ended(gpu.main, "take", results(machine.A_CPU, first=FIRST))
    assert "has no results" in ended(gpu.main, "take", tmp_path / "nowhere")
    (tmp_path / "out" / "first.json").write_text("[1")
    assert "is not what `python -m scripts.gpu run` writes" in ended(gpu.main, "take", tmp_path / "out")
    assert not pages.KEPT.exists()
    pages.take([results("a GPU", first=FIRST)])
    assert "is of another machine or other versions than" in ended(gpu.main, "take", results("another", first=FIRST))
