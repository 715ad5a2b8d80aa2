"""Forks as ranks: what they leave running ends with them, and how an error is said."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron_mtp_patches.rehearsal.ranks import run_ranks

pytestmark = pytest.mark.forked("torch")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_rank_has_started_ends_with_it():
    pids = [returned.value for returned in run_ranks(2, lambda: subprocess.Popen(["sleep", "60"]).pid, 20.0)]
    until = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(pids) == 2 and not any(map(is_running, pids))


def test_an_error_without_words_names_the_line_that_raised_it():
    def fail():
        raise AssertionError

    (returned,) = run_ranks(1, fail, 20.0)
    assert returned.error == "AssertionError: raise AssertionError (test_ranks.py)"
    (returned,) = run_ranks(1, sys.exit, 20.0)
    assert returned.error == "SystemExit: returned = Returned(action()) (ranks.py)"


def test_a_failed_checkpoint_names_the_error_of_a_rank():
    from torch.distributed.checkpoint.api import CheckpointException

    def fail():
        raise CheckpointException("load", {1: (RuntimeError("a key is missing"), None)})

    (returned,) = run_ranks(1, fail, 20.0)
    assert returned.error == "RuntimeError: a key is missing"
