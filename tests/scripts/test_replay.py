"""python -m scripts.replay on a tree that is Megatron-LM in name only."""

import json
import math
import subprocess
import sys
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from scripts.common.process import environment
from scripts.replay import __main__ as replay
from scripts.replay import jobs
from scripts.replay.source import Repository, Tree
from scripts.replay.verdicts import VERDICTS, all_ranks_say, doubtful

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
def test_is_broken(): assert not PATCHED, "as the patches have it"
def test_needs_a_package(): te.Linear(1)
def test_needs_a_name(): nothing(1)
def test_fails(): raise ValueError("no way")
@pytest.mark.skipif(not fp8, reason=reason)
def test_is_skipped(): ...
@pytest.mark.skipif(is_fa_min_version("2"), reason="no")
def test_asks_for_a_version(): ...
"""
FINISHED = {"event": "finished"}


def write(folder, **files):
    for name, text in {
        "megatron/core/__init__.py": "",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = ''\n",
        "megatron/core/utils.py": "def is_fa_min_version(version): import flash_attn",
        **{f"tests/unit_tests/{name}.py": text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def tree(tmp_path):
    write(tmp_path / "tree", **{"optimizer/test_all": "def test_a(): ..."})
    return tmp_path / "tree"


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="a verdict is that it is missing")
def test_every_verdict(tmp_path):
    files = {"optimizer/test_all": TESTS, "new/test_all": TESTS, "inference/test_left_out": "def test_it(): ..."}
    write(tmp_path / "tree", **files)
    words = ["--megatron", tmp_path / "tree", "--ranks", "1", "--work", tmp_path]
    command = [sys.executable, "-m", "scripts.replay", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "newly failing on 1: tests/unit_tests/optimizer/test_all.py::test_is_broken" in done.stdout
    table = json.loads((tmp_path / "tables/cpu/0.18.2.json").read_text())
    counts = dict(zip(VERDICTS, (2, 1, 3, 2, 2, 6, 0), strict=True))
    assert table["totals"] == {"1": counts}
    passing = {"1": ["test_asks_for_a_version", "test_is_fixed", "test_passes"]}
    assert table["passing with the patches"] == {"new/test_all.py": passing, "optimizer/test_all.py": passing}
    assert table["causes of the rest"] == {
        "1": {
            "newly failing": {"failed: AssertionError: as the patches have it": 2},
            "failing either way": {"ValueError: no way": 2},
            "skipped": {"needs TransformerEngine": 4, "needs megatron.core.package_info.nothing": 2},
        }
    }
    text = (tmp_path / "tables/cpu/0.18.2.md").read_text()
    assert "| optimizer/test_all.py | 2 | 1 |  | 1 | 1 | 3 |  |" in text
    assert "| new/test_all.py |  |  | 3 | 1 | 1 | 3 |  |" in text
    assert "| `optimizer/test_all.py::test_is_fixed` | 1 | AssertionError: … is not there |" in text
    assert " | inference/test_left_out.py |" in text.partition("## Left out")[2]


def test_each_file_is_in_one_suite_or_left_out(tmp_path):
    names = ["optimizer/test_a", "test_optimizer", "transformer/moe/test_b", "transformer/test_c", "new/folder/test_d"]
    write(tmp_path, **dict.fromkeys([*names, "inference/test_e", "optimizer/test_a_of_main"], ""))
    shares = {name: files for name, files in replay.share_out(Tree("0.18.2", tmp_path, "")).items() if files}
    reason = next(name for name in shares if name.startswith("generates text"))
    assert shares == {
        "optimizer": ["optimizer/test_a.py", "test_optimizer.py"],
        "mixture of experts": ["transformer/moe/test_b.py"],
        "transformer": ["transformer/test_c.py"],
        "everything else": ["new/folder/test_d.py"],
        reason: ["inference/test_e.py"],
    }


# -- a job: real processes, which import no torch, then processes that are no more than what they write ----------------


@pytest.fixture
def make_job(tree, tmp_path):
    def make(source="", ranks=1):
        write(tree, **{"optimizer/test_all": source})
        # a rehearsal would import torch first
        return jobs.Job(tree, ["optimizer/test_all.py"], ranks, "gpu", "none", tmp_path / "record")

    return make


def by_name(outcomes):
    return {test.partition("::")[2]: tuple(outcome) for test, outcome in outcomes.items()}


def test_a_crash_costs_one_test(make_job):
    job = make_job("import os\ndef test_dies(): os.abort()\ndef test_after_that(): ...")
    outcomes = by_name(jobs.run(job, math.inf, False, lambda ended: None))
    assert outcomes == {"test_dies": ("crashed", "the process crashed"), "test_after_that": ("passed", "")}


def test_a_resumed_job_runs_the_tests_that_are_named_now(make_job, monkeypatch):
    job = make_job("import os\ndef test_a(): assert 'AGAIN' not in os.environ\ndef test_b(): ...")
    for names in (["test_a"], ["test_a", "test_b"]):
        job.files = [f"optimizer/test_all.py::{name}" for name in names]
        outcomes = by_name(jobs.run(job, math.inf, True, print))
        assert outcomes == dict.fromkeys(names, ("passed", ""))
        monkeypatch.setenv("AGAIN", "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_meet_in_the_store_of_the_replay(make_job, ranks):
    """A rank that took itself for the one that opens the store would wait for a port that is in use."""
    source = f"""
import torch.distributed as dist

def test_they_meet():
    dist.init_process_group("gloo")
    assert dist.get_world_size() == {ranks}
    dist.barrier()
    dist.destroy_process_group()
"""
    job = make_job(source, ranks)
    assert by_name(jobs.run(job, math.inf, False, print)) == {"test_they_meet": ("passed", "")}


def test_sockets_fit_into_the_temporary_folder(make_job):
    job = make_job("import multiprocessing\ndef test_starts_a_manager(): multiprocessing.Manager()")
    job.record = job.record.with_name("a long name " * 8)
    assert by_name(jobs.run(job, math.inf, False, print)) == {"test_starts_a_manager": ("passed", "")}


def test_a_test_that_time_left_out_has_not_run(make_job, monkeypatch):
    """Time is up as soon as the first test has ended, however long that took."""
    clock = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    job = make_job("import time\ndef test_a(): ...\ndef test_b(): time.sleep(1000)")
    outcomes = by_name(jobs.run(job, 1.0, False, lambda ended: clock.__setitem__(0, 2.0 * ended)))
    assert outcomes == {"test_a": ("passed", ""), "test_b": ("not run", "time was up")}


def entry(event, test, **more):
    return {"event": event, "test": f"::{test}", **more}


def started(*tests):
    return [
        {"event": "collected", "tests": [f"::{test}" for test in tests]},
        *(entry("started", test) for test in tests),
    ]


def ended(test, outcome="passed", cause=""):
    return entry("ended", test, outcome=outcome, cause=cause)


@pytest.fixture
def run_job(make_job, monkeypatch):
    """run_job((records of each rank, how it ended), ...): the outcomes of a job whose processes write that."""

    def run(*processes, ranks=1, resume=False):
        remaining = iter(processes)

        def run_once(job, ranks, until, advance):
            records, end = next(remaining)
            for path, entries in zip(jobs._records(job), records, strict=True):
                path.write_text("\n".join(map(json.dumps, entries)))
            return end

        monkeypatch.setattr(jobs, "_run_once", run_once)
        outcomes = by_name(jobs.run(make_job(ranks=ranks), math.inf, resume, print))
        assert next(remaining, None) is None, "too few processes"
        return outcomes

    return run


def test_ranks_that_part_cost_one_test(run_job):
    fails, alone = ended("a", "failed", "without me"), ended("a", "failed", "Connection closed")
    parted = ([[*started("a"), alone], [*started("a", "b")[:2], fails]], "crashed")
    whole = ([[*started("b"), ended("b"), FINISHED], [*started("b"), ended("b", "failed", "no"), FINISHED]], "crashed")
    assert run_job(parted, whole, ranks=2) == {"a": ("failed", "without me"), "b": ("failed", "no")}


def test_a_rank_that_waits_in_vain_hangs(run_job):
    waits = ([[*started("a"), ended("a")], started("a")], "hung")
    assert run_job(waits, ([[FINISHED]] * 2, "crashed"), ranks=2) == {"a": ("hung", "a rank waited in vain")}


def test_of_a_test_that_hangs_twice_no_further_case_runs(run_job):
    hangs = [([started(*cases)[:2]], "hung") for cases in (("a[1]", "a[2]", "a[3]", "b"), ("a[2]", "a[3]", "b"))]
    hung = ("hung", "the process hung")
    outcomes = run_job(*hangs, ([[*started("b"), ended("b"), FINISHED]], "crashed"))
    assert outcomes == {"a[1]": hung, "a[2]": hung, "a[3]": jobs.LIKE_OTHERS, "b": ("passed", "")}


def test_a_job_that_is_killed_can_be_resumed(run_job):
    with pytest.raises(StopIteration):
        run_job(([started("a", "b")[:2]], "hung"))  # and is killed before another process starts
    outcomes = run_job(([[*started("b"), ended("b"), FINISHED]], "crashed"), resume=True)
    assert outcomes == {"a": ("hung", "the process hung"), "b": ("passed", "")}


def test_what_a_process_leaves_out_that_died_before_it_collected_has_not_run(run_job):
    outcomes = run_job(([started("a", "b")[:2]], "crashed"), ([[]], "crashed"))
    assert outcomes == {"a": ("crashed", "the process crashed"), "b": ("not run", "the process died before it")}


def test_a_resumed_job_runs_what_time_left_out_and_nothing_else(run_job):
    late = [*started("a", "b")[:2], ended("a", "failed", "before")]
    assert run_job(([late], "late")) == {"a": ("failed", "before"), "b": jobs.LATE}
    resumed = [*started("b"), ended("b"), FINISHED]
    outcomes = {"a": ("failed", "before"), "b": ("passed", "")}
    assert run_job(([resumed], "crashed"), resume=True) == outcomes
    assert run_job(resume=True) == outcomes


class Store(dict):
    """Takes and gives as torch's stores do."""

    def set(self, key, text):
        self[key] = text.encode()

    def wait(self, keys, patience):
        if not self.keys() >= set(keys):
            raise RuntimeError


@pytest.mark.parametrize(
    "texts, together", [({"one": "passed"}, True), ({"one": "failed"}, False), ({"another": "passed"}, False)]
)
def test_ranks_are_in_step_if_all_say_the_same_in_time(texts, together):
    store = Store({key: text.encode() for key, text in texts.items()})
    assert all_ranks_say(store, ["zero", "one"], 0, "passed", timedelta()) == together


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("nowhere", "nowhere: no such folder"),
        (".", "neither a git repository nor a folder that holds megatron/core"),
        ("tree --release 0.19.0", "tree is 0.18.2 and has no history. Leave --release out"),
        ("tree --suite all", "'all' is none of: optimizer; "),
        ("tree --suite optimizer --ranks 3", "no test has run"),
        ("tree --suite optimizer --ranks 1 --minutes 0", "no test has run"),
    ],
)
def test_arguments_that_cannot_be_used(tree, tmp_path, monkeypatch, refused, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(replay.main, "--work", "work", "--megatron", *arguments.split())
    assert not list(tmp_path.rglob("0.18.2.md"))


def test_a_tag_and_a_file_of_another_commit(tree, tmp_path):
    git = ["git", "-C", tree, "-c", "user.name=N", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name, test in (("core_v0.18.2", "def test_old(): ..."), ("core_v0.19.0", "def test_mtp_new(): ...")):
        write(tree, **{"optimizer/test_clip_grads": test})
        for words in (["add", "-A"], ["commit", "-qm", name], ["tag", name]):
            subprocess.run([*git, *words], check=True)
    (tree / "tests/unit_tests/optimizer/test_all.py").unlink()
    repository = Repository(str(tree), tmp_path / "work")
    unpacked = repository.unpack("0.18.2")
    tests = unpacked.folder / "tests" / "unit_tests"
    assert (tests / "optimizer/test_all.py").is_file()
    assert "test_old" in (tests / "optimizer/test_clip_grads.py").read_text()
    taken = repository.take(unpacked, "core_v0.19.0", "optimizer/test_clip_grads.py")
    assert taken == "optimizer/test_clip_grads_of_core_v0_19_0.py"
    assert "test_mtp_new" in (tests / taken).read_text()


@pytest.mark.parametrize(
    "plain, patched, once",
    [
        ("passed", "failed", True),
        ("passed", "hung", True),
        ("hung", "passed", True),
        ("failed", "crashed", True),
        ("hung", "hung", False),
        ("crashed", "crashed", False),
        ("failed", "failed", False),
        ("failed", "passed", False),
    ],
)
def test_what_runs_once_more(plain, patched, once):
    outcomes = {"test": (plain, "")}, {"test": (patched, "")}
    assert doubtful("test", *outcomes) == once
