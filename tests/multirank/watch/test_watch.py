"""A watch is silent in a run whose numbers are right, and names on all ranks what a fault has changed."""

import gc
import logging
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from tests.trainings.muon import needs_muon

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("watch-invariants"), pytest.mark.ranks(2)]

TP = {"tensor_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True}
FSDP = {"use_megatron_fsdp": True, "use_distributed_optimizer": True, "bf16": True, "grad_reduce_in_fp32": True}


def at(fault_step, change):
    """A fault: change(training) before this step."""
    return lambda training, step: change(training) if step == fault_step else None


def weight(training, name="decoder.final_layernorm.weight"):
    return dict(training.bare[0].named_parameters())[name]


def flip_on_last_rank(tensor):
    if torch.distributed.get_rank() == 1:
        bits = tensor.data.view(-1)[:1].view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        bits[0] ^= 8  # more than rounding


@pytest.mark.parametrize(
    "layout, settings", [(TP, {"clip_grad": 1.0}), ({}, {**SHARDED, "clip_grad": 1.0})], ids=["TP2", "sharded"]
)
def test_a_right_training_is_silent_and_has_the_bits_that_it_has_without_a_watch(train, layout, settings):
    watched = train(layout, **settings)
    unwatched = train(layout, **settings, watch_invariants=0, watch_action="warn")
    assert watched.norms == unwatched.norms
    pairs = zip(watched.main_model().values(), unwatched.main_model().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "layout, settings, change, message",
    [
        (TP, {}, lambda training: flip_on_last_rank(weight(training)), "copies differ: weight decoder.final_layernorm"),
        ({}, {}, lambda training: flip_on_last_rank(weight(training)), "copies differ: weight decoder.final_layernorm"),
        (
            TP,
            {"bf16": True},
            lambda training: flip_on_last_rank(weight(training).main_param),
            "copies differ: main weight decoder.final_layernorm",
        ),
        (
            TP,
            {"bf16": True},
            lambda training: weight(training).main_param.add_(1.0),
            "a weight is not its main weight: decoder.final_layernorm.weight",
        ),
        (
            TP,
            {},
            lambda training: weight(training).data[:1].fill_(torch.nan),
            "not finite: weight decoder.final_layernorm",
        ),
        (
            TP,
            {"clip_grad": 1.0},
            lambda training: setattr(weight(training), "tensor_model_parallel", True),
            "the reported gradient norm is wrong: gradient norm: the update reports",
        ),
    ],
    ids=["TP copies", "DP copies", "copies of a main weight", "cast", "NaN", "norm"],
)
def test_a_fault_before_an_update_is_named_on_all_ranks(train, layout, settings, change, message):
    from megatron_overrides.watch.findings import WatchError

    with pytest.raises(WatchError, match=f"watch, step 2: {message}"):
        train(layout, fault=at(2, change), **settings)


@pytest.mark.parametrize("moments", ["of the steps before", "zero"])
def test_a_weight_that_an_update_leaves_out_is_named(train, moments):
    from megatron_overrides.watch.findings import WatchError

    def freeze_step(training):
        for leaf in training.optimizer.chained_optimizers:
            leaf.optimizer.step = lambda *args, **kwargs: None
            for state in leaf.optimizer.state.values() if moments == "zero" else ():
                state["exp_avg"].zero_()

    with pytest.raises(WatchError, match="watch, step 2: a weight does not train: .*decoder.*it has a gradient"):
        train(TP, fault=at(2, freeze_step))


def test_a_skipped_update_of_heads_moves_none_of_them_and_a_weight_that_has_trained_may_move():
    from megatron_overrides.watch.rank_checks import Movement
    from megatron_overrides.watch.weights import Trained, Weight

    def make(name, requires_grad):
        param = torch.nn.Parameter(torch.ones(2), requires_grad)
        trained = Trained(param.data, None, {"lr": 1.0}, SimpleNamespace(state={}))
        return Weight(name, param, trained, None, lambda: param.data, lambda: torch.ones(2))

    head, layer = make("chunk 1 mtp.layers.0.weight", True), make("decoder.weight", True)
    movement = Movement([head, layer], {}, False)
    assert [[flaw.name for flaw in movement.check(skips)] for skips in (True, False)] == [
        [layer.name],
        [head.name, layer.name],
    ]
    frozen = {}
    for requires_grad in (False, True, False):
        weight = make("decoder.weight", requires_grad)
        weight.param.data.mul_(2.0 - requires_grad)
        movement = Movement([weight], frozen, False)
    assert not [*movement.check(False)] and list(frozen) == ["decoder.weight"]


def test_a_step_that_is_meant_to_be_skipped_may_have_gradients_that_are_not_finite(train):
    from megatron_overrides.watch.findings import WatchError

    spoil = at(2, lambda training: weight(training).register_hook(lambda gradient: gradient * math.nan))
    with pytest.raises(AssertionError):  # the training wants each step to update
        train(TP, fault=spoil, clip_grad=1.0, grad_norm_skip_threshold=1e6)
    with pytest.raises(WatchError, match="watch, step 2: not finite: gradient decoder.final_layernorm.weight"):
        train(TP, fault=spoil, clip_grad=1.0)


def test_a_layer_is_named_by_its_number_in_the_whole_model():
    from megatron_overrides.watch.weights import find_weights

    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layer_number, self.inner = number, torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])

    stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(12), Layer(13)]), "norm": torch.nn.LayerNorm(1)})
    names = [one.name for one in find_weights(stage, {}, "chunk 1 ")]
    layers = [f"chunk 1 layers.{number}.inner.0.weight" for number in (11, 12)]
    assert names == [*layers, "chunk 1 norm.weight", "chunk 1 norm.bias"]


def test_an_action_without_a_watch_is_refused():
    from megatron.core.optimizer import OptimizerConfig

    with pytest.raises(ValueError, match="watch_action.* raise does nothing without a watch: give .*watch_invariants"):
        OptimizerConfig(optimizer="adam", lr=1.0, watch_action="raise")
    assert OptimizerConfig(optimizer="adam", lr=1.0, watch_action="raise", watch_invariants=1).watch_invariants


def test_a_frozen_weight_that_the_optimizer_still_moves_is_named(train):
    from megatron_overrides.watch.findings import WatchError

    freeze = at(1, lambda training: weight(training).requires_grad_(False))  # after the optimizer has got it
    with pytest.raises(WatchError, match="watch, step 1: a frozen weight has moved: decoder.final_layernorm.weight"):
        train(TP, fault=freeze)


def test_it_checks_each_nth_step_and_warns_once_of_a_kind(train, caplog, rank):
    with caplog.at_level(logging.WARNING, "megatron_overrides.watch.findings"):
        flip = at(2, lambda training: flip_on_last_rank(weight(training)))
        training = train(TP, steps=6, fault=flip, watch_invariants=2, watch_action="warn")
    said = [record.message for record in caplog.records if record.message.startswith("watch, step")]
    assert len(said) == (rank == 0) and all("watch, step 3: copies differ" in one for one in said)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2 and training.norms


@pytest.mark.parametrize(
    "settings, gaps",
    [
        ({}, ["the gradient norm, as nothing is clipped"]),
        (
            {**SHARDED, "clip_grad": 1.0},
            ["copies of the optimizer's state of {} of {} weights, which no other rank has"],
        ),
        (
            {"bf16": True, "fp16": True, "qk_clip": True},
            ["weights against their main weights, which --qk-clip scales apart", "gradients and their norm under fp16"],
        ),
        (
            {"bf16": True, "clip_grad": 1.0, "has_kernel": True},
            ["weights against main weights that the optimizer's kernel keeps"],
        ),
    ],
    ids=["no clipping", "shards", "qk-clip and fp16", "a kernel"],
)
def test_what_a_layout_leaves_out_is_named(settings, gaps):
    from megatron_overrides.watch.gaps import name_gaps

    weight = SimpleNamespace(trained=1, param=torch.zeros(1), has_main_weight=lambda: not settings.get("has_kernel"))
    config = SimpleNamespace(**{"bf16": False, "fp16": False, "clip_grad": 0.0} | settings)
    alone = 2 if "use_distributed_optimizer" in settings else 0
    names = [*name_gaps([weight] * 2, config, SimpleNamespace(qk_clip=settings.get("qk_clip", False)), alone)]
    assert all(name.startswith(gap.format(2, 2)) for name, gap in zip(names, gaps, strict=True))


class Quantized(torch.Tensor):
    """A tensor without memory, as those of TransformerEngine, which nothing may read."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{function} reads a quantized weight")


def test_a_quantized_weight_is_not_read_but_what_the_optimizer_keeps_of_it(parallel, make_gpt):
    from megatron_overrides.watch.chunks import find_chunks
    from megatron_overrides.watch.rank_checks import Movement, check_casts, check_finite
    from megatron_overrides.watch.tensors import find_tensors
    from megatron_overrides.watch.weights import Trained

    parallel(**TP)
    model = make_gpt(8, 8, mtp_num_layers=None, **TP)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    layer = model.decoder.layers[0].mlp.linear_fc1
    main = torch.ones_like(layer.weight)
    layer.weight = torch.nn.Parameter(Quantized(main))
    layer.weight.main_grad = main
    (chunk,) = find_chunks([model])
    optimizer = SimpleNamespace(state={})
    weights = chunk.find_weights({id(layer.weight): Trained(main, None, {"lr": 1.0}, optimizer)})
    kinds = [one.name.split(" decoder")[0] for one in find_tensors(chunk.place(), weights) if "fc1.weight" in one.name]
    assert kinds == ["gradient", "main weight", "weight"]  # the last is the weight of the other layer
    layer.weight.requires_grad_(False)
    flaws = [*check_casts(weights), *check_finite(weights, True), *Movement(weights, {}, False).check(False)]
    assert not flaws and name in {weight.name for weight in weights}


def test_a_weight_without_a_place_is_in_no_norm_that_is_compared(train, monkeypatch):
    from megatron_overrides.watch import chunks

    def place(model, original=chunks.place):
        placement = original(model)
        shards = [shard for shard in placement.shards if "final_layernorm" not in shard.name]
        return placement._replace(shards=shards)

    monkeypatch.setattr(chunks, "place", place)
    assert train(TP, clip_grad=1.0).norms


def test_a_watched_optimizer_is_freed_with_its_model(train):
    training = train(TP)
    optimizer, model = weakref.ref(training.optimizer), weakref.ref(training.bare[0])
    del training
    gc.collect()
    assert (optimizer(), model()) == (None, None)


def test_a_rank_on_which_nothing_trains_has_weights(monkeypatch):
    from megatron_overrides.watch import weights

    monkeypatch.setattr(weights, "leaves", lambda optimizer: [SimpleNamespace(optimizer=None)])
    (weight_of_layer,) = weights.find_weights(torch.nn.Linear(2, 2, bias=False), weights.find_trained(None), "")
    assert (weight_of_layer.name, weight_of_layer.trained) == ("weight", None)


@needs_muon
def test_a_training_with_muon_is_watched(train):
    from megatron_overrides.watch.findings import WatchError

    flip = at(2, lambda training: flip_on_last_rank(weight(training)))
    with pytest.raises(WatchError, match="watch, step 2: copies differ: weight decoder.final_layernorm"):
        train({}, fault=flip, optimizer="muon", bf16=True)
    training = train({}, steps=2, optimizer="muon", bf16=True, watch_invariants=5)
    assert not training.model[0]._forward_hooks, "the next checked step is the sixth one"


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_a_shard_of_megatron_fsdp_that_is_not_its_main_weight_is_named(train, strategy):
    from megatron_overrides.watch.findings import WatchError

    pytest.importorskip("einops", reason="Megatron-FSDP needs einops")

    def change(training):
        group = training.model[0].param_and_grad_buffer.parameter_groups[0]
        kept = group.model_weight_buffer  # none without shards
        (group.params[0].data if kept is None else kept.data).add_(1.0)

    settings = {**FSDP, "clip_grad": 1.0, "data_parallel_sharding_strategy": strategy}
    assert train({}, **settings).norms
    with pytest.raises(WatchError, match="watch, step 2: a weight is not its main weight: .*decoder"):
        train({}, fault=at(2, change), **settings)


def test_a_weight_of_which_no_rank_has_had_a_gradient_in_three_checks_is_named(train):
    from megatron_overrides.watch.findings import WatchError

    def detach(training):
        weight(training).register_hook(torch.zeros_like)

    with pytest.raises(WatchError, match="watch, step 4: a weight has no gradient: decoder.final_layernorm.weight: no"):
        train(TP, steps=4, fault=at(2, detach))


def test_updates_without_any_gradient_are_no_finding(train):
    """Those of GRPO, where all responses to each prompt have the same reward."""

    def stop(training):
        for param in training.bare[0].parameters():
            param.register_hook(torch.zeros_like)

    assert train(TP, steps=4, fault=at(1, stop)).norms


@pytest.mark.parametrize("with_heads", [True, False])
def test_heads_without_a_gradient_are_named_if_their_loss_has_a_weight(with_heads):
    from megatron_overrides.watch.gradients import Gradients
    from megatron_overrides.watch.tensors import Watched

    tensors = [Watched("main", lambda: torch.ones(2), "decoder"), Watched("head", lambda: torch.zeros(2), "mtp.norm")]
    gradients = Gradients(tensors, torch.device("cpu"))
    for _ in range(3):
        gradients.measure()
    assert [one.names for one in gradients.find_missing(with_heads)] == [["mtp.norm"]] * with_heads


def test_weights_have_their_places_where_parallel_state_has_no_groups(parallel, make_gpt, monkeypatch):
    """As with `dist.use_decentralized_pg` of Megatron-Bridge."""
    from megatron_overrides.model_places import place

    parallel(**TP)
    model = make_gpt(32, 16, mtp_num_layers=None, **TP)
    expected = [shard.name for shard in place(model).shards]
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", None)
    assert [shard.name for shard in place(model).shards] == expected != []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_each_flipped_bit_and_each_swapped_pair_changes_the_sum(dtype, monkeypatch):
    from megatron_overrides.watch import bits

    monkeypatch.setattr(bits, "PIECE", 6)
    monkeypatch.setattr(bits, "ROW", 3)
    monkeypatch.setattr(bits, "_make_factors", bits._make_factors.__wrapped__)
    values = torch.arange(11).to(dtype)
    kept = values.clone()
    before = bits.sum_bits(values)
    for element in range(11):
        for bit in range(8 * values.element_size()):
            flipped = values.clone()
            as_bytes = flipped.view(torch.uint8)
            as_bytes[element * values.element_size() + bit // 8] ^= 1 << bit % 8
            assert bits.sum_bits(flipped) != before
        swapped = values.clone()
        swapped[[element, (element + 1) % 11]] = values[[(element + 1) % 11, element]]
        assert bits.sum_bits(swapped) != before
    assert torch.equal(values, kept)


def test_a_large_tensor_that_is_doubled_has_another_sum():
    from megatron_overrides.watch.bits import sum_bits

    values = torch.ones(2**21)
    assert sum_bits(values) != sum_bits(2.0 * values)
