"""Ranks that differ in their patches are told so, on every rank, instead of hanging."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from megatron_mtp_patches.agreement import compare
from megatron_mtp_patches.engine import PatchError

dist = pytest.importorskip("torch.distributed")

ROOT = Path(__file__).resolve().parents[2]


def compare_all(records: list[str | None], patience: float = 20.0) -> list[str]:
    """What each rank ends with: '' or the error. A rank whose record is None never reports."""
    store = dist.HashStore()

    def run(rank: int) -> str:
        try:
            compare(store, rank, len(records), records[rank], "check", timedelta(seconds=patience))
        except PatchError as error:
            return str(error)
        return ""

    ranks = [rank for rank, record in enumerate(records) if record is not None]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_set_everywhere_passes(size):
    assert compare_all(["a=add b=native"] * size) == [""] * size


def test_a_rank_that_differs_is_named_on_every_rank():
    errors = compare_all(["a=add", "a=add", "a=disabled", "a=add"])
    assert len(set(errors)) == 1
    assert "rank 0, 1, 3: a=add" in errors[0] and "rank 2: a=disabled" in errors[0]
    assert "MEGATRON_MTP_PATCHES" in errors[0]


def test_many_ranks_are_named_in_short():
    errors = compare_all(["a=add"] * 20 + ["a=native"])
    assert "15 and 4 more: a=add" in errors[7] and "rank 20: a=native" in errors[7]


@pytest.mark.parametrize("missing", [1, 0], ids=["another rank", "rank 0"])
def test_a_rank_that_never_reports_is_named_within_the_patience(missing):
    records: list[str | None] = ["a=add"] * 3
    records[missing] = None
    start = time.monotonic()
    errors = compare_all(records, patience=0.5)
    assert time.monotonic() - start < 10
    assert len(errors) == 2
    for error in errors:
        assert f"rank {missing} did not report" in error and "import megatron_mtp_patches on every rank" in error


RANK = """
import logging, os, sys
import torch.distributed as dist
import megatron_mtp_patches
from megatron_mtp_patches.agreement import check_before_model_parallel

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
print(check_before_model_parallel(lambda *args, **kwargs: (args, kwargs), None, (1,), {"a": 2}))
if rank == 1:
    megatron_mtp_patches.apply("none")
try:
    check_before_model_parallel(lambda: print("entered"), None, (), {})
except megatron_mtp_patches.PatchError as error:
    print(error)
dist.barrier()
"""


def test_two_processes_agree_and_then_differ(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "patches"), str(ROOT)))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], results
    for output, _ in results:
        assert "((1,), {'a': 2})\nranks differ" in output  # gloo of torch 2.8 writes lines of its own
        assert "entered" not in output
        assert "=disabled" in output.partition("rank 1: ")[2] and "=disabled" not in output.partition("rank 1: ")[0]
    logged = [errors.count("skip-update-on-large-grad-norm=") for _, errors in results]
    assert logged == [1, 0], "rank 0 alone logs the set, once it is agreed on"


def test_nothing_is_left_in_the_store():
    store = dist.HashStore()
    before = store.num_keys()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: compare(store, rank, 3, "a=add", "check", timedelta(seconds=20)), range(3)))
    assert store.num_keys() == before
