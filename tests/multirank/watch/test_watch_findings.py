"""A finding says how far copies differ and which known defect may be the cause; all findings are counted."""

import inspect
import logging
import math

import megatron_mtp_patches
import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("watch-invariants"), pytest.mark.ranks(3)]

ALL = {"tensor_model_parallel_size": 1}
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
ROUNDED, OTHER, NOT_FINITE = "copies differ by rounding", "copies differ", "of an element some copies are inf or NaN"


@pytest.fixture
def compare(parallel, rank):
    """compare({name: (copies of rank 0, copies of rank 1)}): the finding. The last rank has no copies."""
    from megatron_overrides.watch.copies import Copies
    from megatron_overrides.watch.differences import describe_mismatches
    from megatron_overrides.watch.tensors import Watched

    def run(copies):
        parallel()
        mine = {name: pair[rank] for name, pair in copies.items()} if rank < 2 else {}
        compared = Copies([Watched(name, lambda one=one: one) for name, one in mine.items()], torch.device("cpu"))
        return describe_mismatches(compared, compared.compare())

    return run


def after(value, steps, dtype):
    """The number so many steps of the dtype after a positive one."""
    number = torch.tensor([value], dtype=dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return float((number.view(integers) + steps).view(dtype).double())


@pytest.mark.parametrize(
    "dtype, first, second, relation, said",
    [
        (SINGLE, 1.0, after(1.0, 2, SINGLE), ROUNDED, "largest difference 2.38e-07, at most 2 ulp"),
        (SINGLE, 1.0, after(1.0, 3, SINGLE), OTHER, "at most 3 ulp"),
        (SINGLE, -1.0, -after(1.0, 1, SINGLE), ROUNDED, "at most 1 ulp"),
        (SINGLE, 1e-30, -1e-30, OTHER, "largest difference 2e-30, more than 1000 ulp"),
        (HALF, 1.0, 1.0078125, ROUNDED, "largest difference 0.00781, at most 1 ulp"),
        (torch.float16, 2.0, after(2.0, 3, torch.float16), OTHER, "at most 3 ulp"),
        (DOUBLE, 1.0, after(1.0, 1, DOUBLE), ROUNDED, "at most 1 ulp"),
        (DOUBLE, 4.0, -4.0, OTHER, "largest difference 8, more than 1000 ulp"),
        (SINGLE, 1.0, math.nan, OTHER, NOT_FINITE),
        (SINGLE, torch.finfo(SINGLE).max, math.inf, OTHER, NOT_FINITE),
        (torch.int64, 5, 6, OTHER, "largest difference 1)"),
    ],
)
def test_the_largest_difference_is_said_and_two_ulps_are_rounding(
    compare, monkeypatch, dtype, first, second, relation, said
):
    from megatron_overrides.watch import differences

    monkeypatch.setattr(differences, "PIECE", 16)  # pieces of four elements
    copies = torch.ones(2, 10).to(dtype)
    if dtype.is_floating_point:
        copies[:, 0] = math.inf  # the same in both copies
    copies[0, 5], copies[1, 5] = first, second  # in the second of three pieces
    finding = compare({"weight of a norm": (copies[0], copies[1])})
    assert finding.relation == relation and said in finding.detail


@pytest.mark.parametrize("steps, relation", [(1, ROUNDED), (3, OTHER)])
def test_rounding_is_said_only_where_all_copies_differ_by_no_more(compare, steps, relation):
    pairs = {name: (torch.ones(2), torch.full((2,), after(1.0, 1, SINGLE))) for name in ("weight a", "gradient b")}
    pairs["gradient c"] = torch.ones(2), torch.tensor([1.0, after(1.0, steps, SINGLE)])
    finding = compare(pairs)
    assert (finding.relation, finding.names[0]) == (relation, "weight a") and "at most 1 ulp" in finding.detail


def test_rounding_is_not_said_of_tensors_that_were_not_read(compare, monkeypatch):
    from megatron_overrides.watch import copies

    monkeypatch.setattr(copies, "MOST", 1)
    finding = compare({name: (torch.ones(2), torch.full((2,), after(1.0, 1, SINGLE))) for name in ("weight a", "b")})
    assert (finding.relation, finding.names, finding.total) == (OTHER, ["weight a"], 2)


def change_last_rank(training, amount):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        dict(training.bare[0].named_parameters())["decoder.final_layernorm.weight"].data[:1].add_(amount)


def test_each_finding_is_counted_and_one_of_a_kind_is_measured_and_said(train, caplog, rank, monkeypatch):
    from megatron_overrides.watch import watch

    measured = []
    describe = watch.describe_mismatches
    monkeypatch.setattr(watch, "describe_mismatches", lambda *args: measured.append(1) or describe(*args))
    with caplog.at_level(logging.WARNING, "megatron_overrides.watch.findings"):
        fault = lambda training, step: step == 2 and change_last_rank(training, 0.5)  # noqa: E731
        training = train(ALL, steps=3, fault=fault, watch_action="warn")
    said = [one.message for one in caplog.records if "copies differ" in one.message]
    assert (
        len(measured) == 1
        and len(said) == (rank == 0)
        and all("step 2" in one and "are counted and not said" in one for one in said)
    )
    counted = megatron_mtp_patches.metrics(training.optimizer)
    assert counted == megatron_mtp_patches.metrics() and counted["watch findings"] >= 2


@pytest.mark.parametrize(
    "sums, said",
    [
        ([1, 1, 1, 2], "ranks 0, 1, 2 agree; rank 3 differs"),
        ([1, 1, 1, 2, 2], "ranks 0, 1, 2 agree; ranks 3, 4 differ"),
        ([1, 1, 2, 2], "ranks 0, 1 and ranks 2, 3 differ"),
        ([1, 2], "rank 0 and rank 1 differ"),
        ([1, 1, 2, 3, 4, 5], "ranks 0, 1 agree; rank 2 and rank 3 and 2 more groups differ"),
    ],
)
def test_ranks_are_said_to_agree_where_they_are_more_than_others(sums, said):
    from megatron_overrides.watch.copies import Mismatch
    from megatron_overrides.watch.differences import _describe_groups

    assert _describe_groups(Mismatch("weight", dict(enumerate(sums)), SINGLE, 1)) == said


def test_an_error_has_all_findings_of_a_check_and_says_who_agrees(train):
    from megatron_overrides.watch.findings import WatchError

    def fault(training, step):
        change_last_rank(training, math.nan)

    agree = r"copies differ: weight .*ranks 0, 1 agree; rank 2 differs \(.*\nwatch, step 1: not finite: weight"
    with pytest.raises(WatchError, match=f"(?s)watch, step 1: {agree}"):
        train(ALL, steps=1, fault=fault)


def test_rounding_is_counted_and_raises_nothing(train, caplog, rank):
    with caplog.at_level(logging.WARNING, "megatron_overrides.watch.findings"):
        fault = lambda training, step: step == 3 and change_last_rank(training, 2.0**-23)  # noqa: E731
        train(ALL, steps=3, fault=fault, watch_invariants=2)
    assert megatron_mtp_patches.metrics()["watch findings"] == 1
    assert ("watch, step 3: copies differ by rounding" in caplog.text) == (rank == 0)


def test_a_known_defect_is_looked_for_by_the_relation_and_the_configurations(train, monkeypatch):
    from megatron_mtp_patches.doctor import causes
    from megatron_mtp_patches.doctor.findings import RunSettings

    from megatron_overrides.watch.findings import WatchError

    def name(relation, sources):
        run = RunSettings(sources, None)
        return f"; {relation}, {run.world_size}, {run.clip_grad}, {run.num_layers}, {run.overlap_grad_reduce}"

    monkeypatch.setattr(causes, "name_causes", name)
    fault = lambda training, step: change_last_rank(training, 0.5)  # noqa: E731
    with pytest.raises(WatchError, match=r"watch, step 1: copies differ: .*; copies, 3, 1\.0, 2, True$"):
        train(ALL, steps=1, fault=fault, clip_grad=1.0, overlap_grad_reduce=True)


def test_it_logs_where_it_is_the_only_patch(train, monkeypatch, capsys):
    megatron_mtp_patches.revert()
    try:
        megatron_mtp_patches.apply("watch-invariants")
        train(ALL, steps=1)
        assert megatron_mtp_patches.metrics() == {"watch findings": 0}
        training = pytest.importorskip("megatron.training.training", reason="the 0.16.1 wheel has no megatron.training")
        monkeypatch.setattr(training, "get_args", lambda: training.print_rank_last(" iteration 1 |") or {}["begun"])
        with pytest.raises(KeyError, match="begun"):
            training.training_log(*[None for _ in inspect.signature(training.training_log).parameters])
        assert " iteration 1 | watch findings:   0 |" in capsys.readouterr().out or torch.distributed.get_rank() < 2
    finally:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply()
