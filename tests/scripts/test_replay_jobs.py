"""The jobs of python -m scripts.replay: real processes, then some that are what they write."""

import json
import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from scripts.replay import jobs
from scripts.replay.verdicts import all_ranks_say

pytestmark = [
    pytest.mark.forked("torch"),
    pytest.mark.real_process("a job starts interpreters, each with its own environment"),
]
FINISHED = {"event": "finished"}


@pytest.fixture
def make_job(write_tree, tree, tmp_path):
    def make(source="", ranks=1, device="gpu"):
        """A rehearsal, on cpu, imports torch first."""
        write_tree(tree, **{"optimizer/test_all": source})
        return jobs.Job(tree, ["optimizer/test_all.py"], ranks, device, "none", tmp_path / "outcomes")

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


def test_ranks_meet_in_the_store_of_the_replay(make_job):
    """A rank that took itself for the one that opens the store would wait for a port that is in use."""
    source = """
import torch.distributed as dist

def test_they_meet():
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    dist.barrier()
    dist.destroy_process_group()
"""
    job = make_job(source, 2, "cpu")
    assert by_name(jobs.run(job, math.inf, False, print)) == {"test_they_meet": ("passed", "")}


def test_sockets_fit_into_the_temporary_folder(make_job):
    job = make_job("import multiprocessing\ndef test_starts_a_manager(): multiprocessing.Manager()")
    job.outcome_file = job.outcome_file.parent / ("a long name " * 8) / "outcomes"
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
    """run_job((outcomes of each rank, how it ended), ...): the outcomes of a job whose processes write that."""

    def run(*processes, ranks=1, resume=False):
        remaining = iter(processes)

        def run_once(job, ranks, until, advance):
            outcomes, end = next(remaining)
            for path, entries in zip(jobs._outcome_files(job), outcomes, strict=True):
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


@pytest.mark.parametrize(
    "texts, together", [({"one": "passed"}, True), ({"one": "failed"}, False), ({"another": "passed"}, False)]
)
def test_ranks_are_in_step_if_all_say_the_same_in_time(texts, together):
    store = HashStore()
    for key, text in texts.items():
        store.set(key, text)
    assert all_ranks_say(store, ["zero", "one"], 0, "passed", timedelta(milliseconds=1)) == together
