"""python -m scripts.replay on a tree that is Megatron-LM in name only."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from scripts.common.process import environment
from scripts.replay import jobs
from scripts.replay.source import Repository, Tree

pytestmark = [
    pytest.mark.forked("python"),
    pytest.mark.real_process("a replay starts interpreters: a checkout shadows the installed Megatron"),
]
TESTS = """
import os

import pytest
import transformer_engine as te
from transformer_engine.pytorch.fp8 import check_fp8_support
from megatron.core.package_info import MAJOR, nothing
from megatron.core.utils import is_fa_min_version

PATCHED = os.environ["MEGATRON_MTP_PATCHES"] != "none"
fp8, reason = check_fp8_support()

def test_passes(): assert MAJOR == 0
def test_is_fixed(): assert PATCHED, "0x7f00 is not there"
def test_needs_a_package(): te.Linear(1)
def test_needs_a_name(): nothing(1)
def test_fails(): raise ValueError("no way")
@pytest.mark.skipif(not fp8, reason=reason)
def test_is_skipped(): ...
@pytest.mark.skipif(is_fa_min_version("2"), reason="no")
def test_asks_for_a_version(): ...
"""
DIES = """
import os
def test_dies(): os.abort()
def test_after_that(): ...
"""
DIES_BEFORE_IT_COLLECTS = """
import os
from pathlib import Path
again = Path("again")
if again.exists(): os.abort()
again.touch()
def test_dies(): os.abort()
def test_after_that(): ...
"""
PARTS = """
import os
import time
import torch.distributed as dist

seen = []

def test_parts():
    seen.append(os.getpid())
    assert os.environ["RANK"] == "0", "without me"
    time.sleep(1000)

def test_after_that():
    assert not seen
    dist.init_process_group("gloo")
    dist.barrier()

def test_passes_on_rank_0(): assert os.environ["RANK"] == "0"
"""
BROKEN = """
import os
def test_is_broken(): assert os.environ["MEGATRON_MTP_PATCHES"] == "none", "as the patches have it"
"""
UTILS = "def is_fa_min_version(version): import flash_attn"


def write(folder, **files):
    for name, text in {
        "megatron/core/__init__.py": "",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = ''\n",
        "megatron/core/utils.py": UTILS,
        **{f"tests/unit_tests/{name}.py": text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def replay(work, *arguments):
    command = [sys.executable, "-m", "scripts.replay", "--work", work, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)


@pytest.fixture
def tree(tmp_path):
    write(tmp_path / "tree", **{"optimizer/test_all": TESTS})
    return tmp_path / "tree"


def read(work):
    (table,) = (work / "tables").glob("cpu*/0.18.2.json")
    return json.loads(table.read_text())


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A replay on one rank of a tree in which each verdict is due: (exit code, output, folder)."""
    folder = tmp_path_factory.mktemp("replay")
    left_out = {"inference/test_left_out": "def test_it(): ..."}
    write(folder / "tree", **{"optimizer/test_all": TESTS, "optimizer/test_broken": BROKEN, **left_out})
    done = replay(folder, "--megatron", folder / "tree", "--suite", "optimizer", "--ranks", "1")
    return done.returncode, done.stdout + done.stderr, folder


@pytest.fixture
def run_job(tree, tmp_path):
    """run_job(source, ranks, until=...): {test: (outcome, cause)} of this file, unpatched, until that time."""

    def run_one(source, ranks, until=math.inf, seen=lambda ended: None, resume=False):
        write(tree, **{"optimizer/test_all": source})
        # a rehearsal would import torch first
        job = jobs.Job(tree, ["optimizer/test_all.py"], ranks, "gpu", "none", tmp_path / "record")
        return {test.partition("::")[2]: outcome for test, outcome in jobs.run(job, until, resume, seen).items()}

    return run_one


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="a verdict is that it is missing")
def test_every_verdict(replayed):
    _, output, folder = replayed
    table = read(folder)
    assert table["totals"] == {
        "1": {
            "still passing": 2,
            "fixed": 1,
            "newly failing": 1,
            "failing either way": 1,
            "skipped": 3,
            "not run": 0,
        }
    }, output
    assert table["passing with the patches"] == {
        "optimizer/test_all.py": {"1": ["test_asks_for_a_version", "test_is_fixed", "test_passes"]}
    }
    assert table["causes of the rest"] == {
        "1": {
            "newly failing": {"failed: AssertionError: as the patches have it": 1},
            "failing either way": {"ValueError: no way": 1},
            "skipped": {"needs TransformerEngine": 2, "needs megatron.core.package_info.nothing": 1},
        }
    }
    text = (folder / "tables/cpu/0.18.2.md").read_text()
    assert "| optimizer/test_all.py | 2 | 1 |  | 1 | 3 |  |" in text
    assert "| `optimizer/test_all.py::test_is_fixed` | 1 | AssertionError: … is not there |" in text
    assert " | inference/test_left_out.py |" in text.partition("## Left out")[2]


def test_newly_failing_ends_with_1(replayed):
    code, output, folder = replayed
    assert code == 1, output
    assert "newly failing on 1: tests/unit_tests/optimizer/test_broken.py::test_is_broken" in output
    (folder / "tree" / "tests" / "unit_tests" / "optimizer" / "test_broken.py").write_text("def test_is_broken(): ...")
    again = replay(folder, "--megatron", folder / "tree", "--suite", "optimizer", "--ranks", "1", "--resume")
    assert again.returncode == 1, "a test that has an outcome runs again"


def test_what_passed_in_an_earlier_table_has_to_pass(replayed, tree, tmp_path):
    write(tree, **{"optimizer/test_all": "def test_passes(): assert False, 'now'"})
    arguments = ["--megatron", tree, "--suite", "optimizer", "--ranks", "1"]
    done = replay(tmp_path / "now", *arguments, "--expected", replayed[2] / "tables")
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "test_all.py::test_passes on 1: it passed in the table, now: failing either way" in said
    assert "test_all.py::test_asks_for_a_version on 1: it passed in the table, it was not collected" in said
    assert "test_fails on 1" not in said


def test_each_file_is_in_one_suite_or_left_out(tmp_path):
    from scripts.replay.__main__ import share_out

    names = ["optimizer/test_a", "test_optimizer", "transformer/moe/test_b", "transformer/test_c", "new/folder/test_d"]
    write(tmp_path, **dict.fromkeys([*names, "inference/test_e", "optimizer/test_a_of_main"], ""))
    found = {name: files for name, files in share_out(Tree("0.18.2", tmp_path, "")).items() if files}
    reason = next(name for name in found if name.startswith("generates text"))
    assert found == {
        "optimizer": ["optimizer/test_a.py", "test_optimizer.py"],
        "mixture of experts": ["transformer/moe/test_b.py"],
        "transformer": ["transformer/test_c.py"],
        "everything else": ["new/folder/test_d.py"],
        reason: ["inference/test_e.py"],
    }


def test_a_file_that_time_left_out_has_not_run_and_runs_when_resumed(run_job):
    source = "def test_a(): ..."
    found = run_job(source, 1, until=-math.inf)
    assert found == {"": jobs.LATE}
    found = run_job(source, 1, resume=True)
    assert found == {"test_a": ("passed", "")}


def test_a_crash_costs_one_test(run_job):
    found = run_job(DIES, ranks=1)
    assert found == {"test_dies": ("crashed", "the process crashed"), "test_after_that": ("passed", "")}


def test_what_a_process_leaves_out_that_died_before_it_collected_has_not_run(run_job):
    found = run_job(DIES_BEFORE_IT_COLLECTS, ranks=1)
    assert found["test_after_that"] == ("not run", "the process died before it")


def test_ranks_that_part_cost_one_test(run_job):
    assert run_job(PARTS, ranks=2) == {
        "test_parts": ("failed", "AssertionError: without me"),
        "test_after_that": ("passed", ""),
        "test_passes_on_rank_0": ("failed", "AssertionError: assert '1' == '0'"),
    }


@pytest.mark.parametrize("arguments", [("--ranks", "3"), ("--ranks", "1", "--minutes", "0")])
def test_a_run_in_which_nothing_runs_is_no_success(tree, tmp_path, arguments):
    done = replay(tmp_path, "--megatron", tree, "--suite", "optimizer", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no test has run" in done.stderr
    assert not list(tmp_path.rglob("0.18.2.md"))


def test_a_test_that_time_left_out_has_not_run(run_job, monkeypatch):
    """Time is up as soon as the first test has ended, however long that took."""
    clock = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    source = "import time\ndef test_a(): ...\ndef test_b(): time.sleep(1000)"
    found = run_job(source, 1, until=1.0, seen=lambda ended: clock.__setitem__(0, 2.0 * ended))
    assert found == {"test_a": ("passed", ""), "test_b": ("not run", "time was up")}


def test_a_resumed_job_runs_what_time_left_out_and_nothing_else(run_job, tmp_path):
    kept = {f"tests/unit_tests/optimizer/test_all.py::{name}": outcome for name, outcome in {
        "test_a": ("failed", "before"), "test_b": jobs.LATE}.items()}  # fmt: skip
    (tmp_path / "record.outcomes.json").write_text(json.dumps(kept))
    source = "def test_a(): ...\ndef test_b(): ..."
    found = {test: tuple(outcome) for test, outcome in run_job(source, 1, resume=True).items()}
    assert found == {"test_a": ("failed", "before"), "test_b": ("passed", "")}


def test_a_tag_and_a_file_of_another_commit(tree, tmp_path):
    git = ["git", "-C", tree, "-c", "user.name=N", "-c", "user.email=e"]
    for name, test in (("core_v0.18.2", "def test_old(): ..."), ("core_v0.19.0", "def test_mtp_new(): ...")):
        write(tree, **{"optimizer/test_clip_grads": test})
        if name == "core_v0.18.2":
            subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
        subprocess.run([*git, "tag", name], check=True)
    (tree / "tests" / "unit_tests" / "optimizer" / "test_all.py").unlink()
    repository = Repository(str(tree), tmp_path / "work")
    unpacked = repository.unpack("0.18.2", "core_v0.18.2")
    tests = unpacked.folder / "tests" / "unit_tests"
    assert (tests / "optimizer" / "test_all.py").is_file()
    assert "test_old" in (tests / "optimizer" / "test_clip_grads.py").read_text()
    taken = repository.take(unpacked, "core_v0.19.0", "optimizer/test_clip_grads.py")
    assert taken == "optimizer/test_clip_grads_of_core_v0_19_0.py"
    assert "test_mtp_new" in (tests / taken).read_text()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--megatron", "nowhere"], "nowhere: no such folder"),
        (["--megatron", "."], "neither a git repository nor a folder that holds megatron/core"),
        (["--megatron", "tree", "--release", "0.19.0"], "tree is 0.18.2 and has no history. Leave --release out"),
        (["--megatron", "tree", "--expected", "tables"], "/0.18.2.json. Make it with --out."),
        (["--megatron", "tree", "--suite", "all"], "no such suite. It has: 'optimizer', "),
    ],
)
def test_arguments_that_cannot_be_used(tree, tmp_path, arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.replay", *arguments],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "plain, patched, once, resumed",
    [
        ("passed", "failed", True, True),
        ("passed", "hung", True, True),
        ("hung", "passed", True, True),
        ("failed", "crashed", True, True),
        ("hung", "hung", False, True),
        ("crashed", "crashed", False, False),
        ("failed", "failed", False, False),
        ("failed", "passed", False, False),
    ],
)
def test_what_runs_once_more(plain, patched, once, resumed):
    from scripts.replay.verdicts import doubtful

    outcomes = {"test": (plain, "")}, {"test": (patched, "")}
    assert doubtful("test", *outcomes, resumed=False) == once
    assert doubtful("test", *outcomes, resumed=True) == resumed
