"""Ranks that differ in their patches raise an error that names them, on every rank, instead of hanging."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import megatron_mtp_patches
import pytest
import torch.distributed as dist
from megatron_mtp_patches.engine import PatchError
from megatron_mtp_patches.engine.call import Call
from megatron_mtp_patches.run_record.agreement import check_before_model_parallel, compare
from megatron_mtp_patches.run_record.provenance import summarize

from tests.warm.processes import LIMIT, run_ranks

pytestmark = pytest.mark.forked("torch")


def compare_as_rank(store, rank: int, records: list[str | None], patience: float = LIMIT) -> str:
    """What this rank ends with: '' or the error."""
    try:
        compare(store, rank, len(records), records[rank], "check", timedelta(seconds=patience))
    except PatchError as error:
        return str(error)
    return ""


def compare_all(records: list[str], store: dist.Store | None = None) -> list[str]:
    """What each rank ends with."""
    store = store or dist.HashStore()
    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(lambda rank: compare_as_rank(store, rank, records), range(len(records))))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_patches_everywhere_pass(size):
    store = dist.HashStore()
    before = store.num_keys()
    assert compare_all(["a=applied b=native"] * size, store) == [""] * size
    assert store.num_keys() == before, "nothing is left in the store"


def test_a_rank_that_differs_is_named_on_every_rank_with_what_differs():
    same = "0.2.0 a=applied b=native"
    errors = compare_all([same, same, "0.2.0 a=disabled b=native", same])
    assert len(set(errors)) == 1 and "MEGATRON_MTP_PATCHES" in errors[0]
    assert errors[0].endswith(":\n  ranks 0, 1 and 3: a=applied\n  rank 2: a=disabled")


def test_many_ranks_are_abbreviated():
    errors = compare_all(["a=applied"] * 20 + ["a=native"])
    assert "ranks 0, 1, 2" in errors[7] and "15 and 4 more: a=applied" in errors[7] and "rank 20: a=native" in errors[7]


def test_ranks_that_never_report_are_named():
    store = dist.HashStore()
    records = ["a=applied", None, "a=applied", None]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(compare_as_rank, store, 2, records)
        store.wait(["check/rank2"], timedelta(seconds=LIMIT))
        errors = [compare_as_rank(store, 0, records, patience=0.5), other.result()]
    for error in errors:
        assert "ranks 1 and 3 did not report the patches within 0:00:00.5" in error
        assert "import megatron_mtp_patches on every rank" in error


def test_rank_0_that_never_reports_is_named():
    error = compare_as_rank(dist.HashStore(), 1, [None, "a=applied"], patience=0.25)
    assert "rank 0 did not report the patches within 0:00:00.5" in error  # twice, as rank 0 may wait for a third
    assert "import megatron_mtp_patches on every rank" in error


def test_two_processes_agree_and_then_differ(caplog, monkeypatch):
    def be_one_of_two():
        monkeypatch.setattr("megatron_mtp_patches.run_record.agreement.describe_mixture", lambda: "two releases")
        caplog.set_level("INFO")
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        megatron_mtp_patches.apply()
        mine = megatron_mtp_patches.record()
        entered = check_before_model_parallel(Call(lambda *args, **kwargs: (args, kwargs), None, (1,), {"a": 2}))
        assert entered == ((1,), {"a": 2})
        if rank == 1:
            megatron_mtp_patches.apply("none")
        with pytest.raises(PatchError, match="ranks differ") as raised:
            check_before_model_parallel(Call(lambda: pytest.fail("entered"), None, (), {}))
        of_rank_0, _, of_rank_1 = str(raised.value).partition("rank 1: ")
        assert "=disabled" in of_rank_1 and "=disabled" not in of_rank_0
        logged = [(record.levelname, record.args[0]) for record in caplog.records if "agreement" in record.name]
        agreed = [("WARNING", summarize(mine)), ("INFO", mine), ("WARNING", "two releases")]
        assert logged == (agreed if rank == 0 else []), "rank 0 alone logs the patches, once they are agreed on"
        dist.barrier()

    ranks = run_ranks(2, be_one_of_two)
    assert [rank.code for rank in ranks] == [0, 0], ranks
