"""Forks as ranks: what they leave running ends with them."""

import subprocess
import time
from pathlib import Path

import pytest
from megatron_mtp_patches.rehearsal.ranks import run_ranks

pytestmark = pytest.mark.forked("python")


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
