"""Tensors are put together from the parts of ranks; a deviation is a finding beyond the spread of the reference."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches.parity.comparison import HIDDEN, Deviation, compare, compare_random_states, merge
from megatron_mtp_patches.parity.legitimate import find_dependence
from megatron_mtp_patches.parity.training import Printed, Record
from megatron_mtp_patches.parity.verdict import FACTOR, Tolerance, judge

pytestmark = pytest.mark.forked("torch")
WHOLE = torch.arange(1.0, 9.0).reshape(4, 2)
RUN = SimpleNamespace(moe_router_load_balancing_type="none", moe_expert_capacity_factor=None, optimizer="adam")
RUN.grad_reduce_in_bf16, RUN.world_size = False, 2


def part(rows, values=None):
    return ((4, 2), (slice(*rows), slice(0, 2)), WHOLE[slice(*rows)] if values is None else values)


def record(gradient, loss=2.0, norm=3.0, buffers=None):
    parts = {"weight": gradient}
    weights = [{"weight": [(shape, region, 0 * values) for shape, region, values in gradient]}, parts]
    line = {"grad norm": Printed(norm, 0.001)}
    return Record([{"lm loss": [loss]}], [norm], [line], [parts], weights, [buffers or {}])


def read_line(numbers):
    return {name: Printed.read(text) for name, text in numbers.items()}


def test_parts_of_two_ranks_are_a_whole():
    whole = merge([{"weight": [part((0, 2))]}, {"weight": [part((2, 4))]}])
    assert torch.equal(whole.values["weight"], WHOLE) and whole.copies == {}


def test_copies_that_differ_are_measured_by_the_largest_entry():
    whole = merge([{"weight": [part((0, 4))]}, {"weight": [part((2, 4), WHOLE[2:] + 2.0)]}])
    assert whole.copies == {"weight": 2.0 / 10.0}


def test_the_same_numbers_deviate_by_nothing():
    cut = [record([part((0, 2))]), record([part((2, 4))])]
    assert {one.size for one in compare([record([part((0, 4))])], cut)} == {0.0}


def test_what_a_line_rounds_is_compared_with_all_its_digits():
    one, cut = record([part((0, 4))]), record([part((0, 4))])
    one.lines[0] |= read_line({"lm loss": "2.0", "z_loss": "1.000", "params norm": "54.321", "mtp_1 loss": "5.1E+00"})
    cut.lines[0] |= read_line({"lm loss": "2.01", "z_loss": "1.002", "params norm": "54.322", "mtp_1 loss": "5.3E+00"})
    cut.lines[0]["grad norm"] = Printed(3.01, 0.001)
    assert [deviation.name for deviation in compare([one], [cut]) if deviation.size] == ["mtp_1 loss", "z_loss"]


@pytest.mark.parametrize(
    "cut, kind, name",
    [
        ([record([part((0, 4))], loss=2.5)], "loss", "lm loss"),
        ([record([part((0, 4))]), record([part((0, 4))], norm=3.3)], "gradient norm", "of rank 1"),
        ([record([part((0, 2))])], "gradient", "weight"),
        ([record([part((0, 4), 2 * WHOLE)])], "update", "weight"),
        ([record([part((0, 4))]), record([part((0, 2), 3 * WHOLE[:2])])], "copies", "gradient weight"),
        ([record([part((0, 4))], buffers={"bias": [part((0, 4), 3 * WHOLE)]})], "buffer", "bias"),
    ],
)
def test_what_differs_is_named(cut, kind, name):
    deviations = [
        one for one in compare([record([part((0, 4))], buffers={"bias": [part((0, 4))]})], cut) if one.size > 0
    ]
    assert (kind, name) in {(one.kind, one.name) for one in deviations}


def test_a_weight_that_only_one_of_the_two_has_is_infinitely_far():
    (missing,) = (one for one in compare([record([part((0, 4))])], [record([])]) if one.kind == "gradient")
    assert math.isinf(missing.size)


def test_a_deviation_is_a_line():
    assert str(Deviation(2, "loss", "lm loss", 0.0123)) == "loss lm loss, step 2: off by 0.012 times its size"
    copies = Deviation(1, "copies", "gradient weight", math.inf)
    assert str(copies) == "copies of the gradient weight, step 1: absent in one of the two"


def test_a_finding_is_beyond_the_spread_and_zeros_never_are():
    tolerance = Tolerance([Deviation(1, "gradient", "weight", 1e-6), Deviation(1, "update", "weight", 1e-3)])
    sizes = {"small": 0.9 * FACTOR * 1e-6, "large": 1.1 * FACTOR * 1e-6}
    deviations = [Deviation(1, "gradient", name, size) for name, size in sizes.items()]
    update = Deviation(1, "update", "weight", 9e-3)
    others, missing = (Deviation(1, "log", "num zeros", size) for size in (0.1, math.inf))
    verdict = judge([*deviations, update, others, missing], tolerance, RUN)
    assert [one.name for one in verdict.findings] == ["large"]
    assert sorted(verdict.dependences.values()) == [[others], [missing]]  # two reasons


@pytest.mark.parametrize("is_bf16, has_fsdp", [(True, False), (False, True), (False, False)])
def test_sums_in_bf16_are_rounded_and_change_no_more(is_bf16, has_fsdp):
    run = SimpleNamespace(**vars(RUN) | {"grad_reduce_in_bf16": True, "bf16": is_bf16, "use_megatron_fsdp": has_fsdp})
    rounded, doubled = (Deviation(1, "gradient", "weight", size) for size in (2**-8, 1.0))
    assert judge([rounded, doubled], Tolerance([]), run).findings == [doubled, rounded][: 2 - (is_bf16 or has_fsdp)]


def test_weights_that_choose_other_experts_when_moved_are_not_steady():
    assert Tolerance([Deviation(1, "gradient", "weight", 1e-5)]).is_steady
    assert not Tolerance([Deviation(1, "gradient", "weight", 0.05)]).is_steady


def test_weights_moved_by_the_rounding_of_bf16_are_steady_as_long_as_they_choose_the_same_experts():
    assert Tolerance([Deviation(1, "gradient", "weight", 0.05)], "bf16").is_steady
    assert not Tolerance([Deviation(1, "gradient", "weight", 0.5)], "bf16").is_steady


def test_a_run_is_moved_by_the_rounding_of_its_dtype(monkeypatch):
    from megatron_mtp_patches.parity import trainings
    from megatron_mtp_patches.parity.flags import Flag
    from megatron_mtp_patches.parity.verdict import STEP

    steps = []
    monkeypatch.setattr(trainings, "run", lambda job: steps.append(job.step) or [record([part((0, 4))])])
    for flags in ((), (Flag("--bf16"),)):
        assert trainings.Trainings("script", flags, "whole").reference.tolerance.is_steady
    others = [factor * STEP["bf16"] for factor in trainings.OTHERS]
    assert steps == [0.0, STEP["fp32"], 0.0, STEP["bf16"], *others]
    assert STEP["bf16"] == torch.finfo(torch.bfloat16).eps / 2 > STEP["fp32"]


def test_a_run_that_stays_unsteady_is_moved_in_other_directions_and_the_largest_deviations_count(monkeypatch):
    from megatron_mtp_patches.parity import trainings
    from megatron_mtp_patches.parity.verdict import STEP

    steps = []

    def train(job):
        steps.append(job.step)
        loss = {0.0: 2.0, STEP["fp32"]: 2.001}.get(job.step, 2.5)
        return [record([part((0, 4), WHOLE * (1 + (job.step > 0)))], loss=loss)]

    monkeypatch.setattr(trainings, "run", train)
    tolerance = trainings.Trainings("script", (), "whole").reference.tolerance
    assert len(steps) == 2 * trainings.DRAWS + len(trainings.OTHERS) == len(set(steps)) + 2 * (trainings.DRAWS - 1)
    assert tolerance.of(Deviation(1, "loss", "lm loss", 0.0)) == FACTOR * 0.5 / 2.5


def test_other_steps_move_weights_in_other_directions():
    from megatron_mtp_patches.parity import weights

    from megatron_overrides.model_places import Shard

    param = torch.nn.Parameter(torch.empty(4, 2))
    shard = Shard("a.weight", (4, 2), (slice(0, 4), slice(0, 2)), param, ((4, 2), (2, 1), 0))
    moves = []
    for step in (0.0, 1e-3, 2e-3):
        weights.fill([shard], False, 0, step)
        moves.append(param.detach().clone())
    first, second = ((moved / moves[0] - 1) for moved in moves[1:])
    assert first.abs().max() <= 1.01e-3 < second.abs().max() <= 2.02e-3
    assert not torch.allclose(second, 2 * first, atol=1e-4)


def test_a_defect_that_the_patches_remove_explains_nothing_with_them(monkeypatch):
    from megatron_mtp_patches.parity import explanations

    def finding(name, is_removed, kind="wrong numbers"):
        return SimpleNamespace(id=name, is_removed=is_removed, kind=kind)

    acting = {
        "cut": [finding("both", False), finding("cut", False), finding("removed", True), finding("a", False, "hang")]
    }
    acting["reference"] = [finding("both", False)]
    monkeypatch.setattr(explanations, "find_defects", lambda settings: acting[settings.layout])
    explaining = explanations.known_explanations({"layout": "cut"}, {"layout": "reference"}, "whole")
    assert [(one.id, in_reference) for one, in_reference in explaining] == [("cut", False), ("both", True)]


def test_a_number_of_the_log_has_its_own_tolerance():
    tolerance = Tolerance([Deviation(1, "log", "num zeros", 1.0), Deviation(1, "log", "mtp_1 loss", 1e-4)])
    small, large = (Deviation(1, "log", "mtp_1 loss", FACTOR * 1e-4 * part) for part in (0.9, 1.1))
    assert judge([small, large], tolerance, RUN).findings == [large]


def test_a_deviation_begins_with_the_first_hidden_state_in_the_order_of_a_step():
    sizes = {"layer 1": 1e-9, "layer 2": 1e-3, "layer 3": 0.5}
    states = [Deviation(1, HIDDEN[0], name, size) for name, size in sizes.items()]
    gradients = [Deviation(1, HIDDEN[1], name, 1.0) for name in ("layer 3", "layer 2")]
    weight = Deviation(1, "gradient", "weight", 1.0)
    verdict = judge([*states, *gradients, weight], Tolerance([]), RUN)
    assert verdict.findings == [weight] and verdict.begins == states[1]
    assert judge([*gradients, weight], Tolerance([]), RUN).begins == gradients[0]
    later = [one._replace(step=2) for one in states]
    assert judge([*later, weight], Tolerance([]), RUN).begins is None  # gradients of the first step are the cause
    assert judge([*later, weight._replace(step=2)], Tolerance([]), RUN).begins == later[1]


@pytest.mark.parametrize("data, context, is_one", [(2, 1, True), (2, 2, True), (1, 2, False)])
def test_the_global_auxiliary_loss_depends_on_data_parallel_ranks_alone(data, context, is_one):
    sizes = {"data_parallel_size": data, "context_parallel_size": context}
    run = SimpleNamespace(**vars(RUN) | sizes | {"moe_router_load_balancing_type": "global_aux_loss"})
    assert (find_dependence(Deviation(1, "gradient", "weight", 1.0), run) is not None) is is_one


@pytest.mark.parametrize(
    "cut, is_one", [({}, False), ({"sequence_parallel": True}, True), ({"context_parallel_size": 2}, True)]
)
def test_sinkhorn_depends_on_the_tokens_of_a_rank(cut, is_one):
    sizes = {"data_parallel_size": 2, "context_parallel_size": 1, "sequence_parallel": False} | cut
    run = SimpleNamespace(**vars(RUN) | sizes | {"moe_router_load_balancing_type": "sinkhorn"})
    assert (find_dependence(Deviation(1, "gradient", "weight", 1.0), run) is not None) is is_one


def test_random_states_are_compared_rank_by_rank():
    ranks = [Record(random=[{"Python": 1, "numpy": 2}]) for _ in range(2)]
    others = [Record(random=[{"Python": 1, "numpy": 2}]), Record(random=[{"Python": 3, "numpy": 2}])]
    assert not list(compare_random_states(ranks, ranks))
    (deviation,) = compare_random_states(ranks, others)
    assert deviation.name == "of Python on rank 1" and deviation.size


def test_what_is_defined_in_one_of_several_runs_is_no_finding():
    deviation = Deviation(1, "update", "weight", 0.5)
    muon = SimpleNamespace(**{**vars(RUN), "optimizer": "muon", "muon_tp_mode": "blockwise"})
    muon.tensor_model_parallel_size = 2
    assert judge([deviation], Tolerance([]), RUN).findings == judge([deviation], Tolerance([])).findings == [deviation]
    assert not judge([deviation], Tolerance([]), RUN, muon).findings
