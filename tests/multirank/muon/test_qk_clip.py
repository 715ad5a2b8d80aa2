"""QK clipping scales the weights of each attention layer by the rule, in the model and in the optimizer.

The largest logits are those that TransformerEngine's attention reports in a forward pass. The reference scales whole
weights, head by head, in float64.
"""

import math
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import qk_clip

from megatron_overrides.muon.qk_clip.clipping import attention_layers

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-qk-of-all-layers"), pytest.mark.ranks(2)]

pytest.importorskip("transformer_engine", reason="TransformerEngine's attention reports the largest logits")
from tests.trainings.qk_clip import (  # noqa: E402
    HEADS,
    HIDDEN,
    LAYOUTS,
    TRAININGS,
    Training,
    build,
    run,
    train,
    why_not,
)
from tests.trainings.qk_clip_weights import gather, scale_by_rule, scaled_params, whole  # noqa: E402


@pytest.fixture
def start(parallel, record_property):
    """start(training): the chunks of its model, which has taken a step, and its optimizer."""

    def make(training):
        if reason := why_not(training):
            if training in TRAININGS:
                record_property("qk_clip", [str(training), {"not run": reason}])
            pytest.skip(reason)
        parallel(**LAYOUTS[training.layout])
        return build(training)

    return make


def set_threshold(chunks):
    """Clip at the median of all heads of all ranks: (layers of this rank, the largest logits of the heads of each)."""
    layers = list(attention_layers(chunks))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    largest = []
    for layer in layers:
        logits = layer.core_attention.current_max_attn_logits.detach().float().clone()
        torch.distributed.all_reduce(logits, torch.distributed.ReduceOp.MAX, group)
        largest.append(gather(logits))
    threshold = torch.cat(largest).median() if largest else torch.tensor(0.0)
    torch.distributed.broadcast(threshold, 0)
    for layer in layers:
        layer.config.qk_clip_threshold = float(threshold)
    return layers, largest


class Differences(NamedTuple):
    """How far clipping is from the rule, on the rank where it is farthest.

    Attributes:
        reported: the difference of the reported maximum.
        model: the largest relative difference of the weights that the model has.
        optimizer: that of the weights in fp32 that its optimizer has.
        error: what a rank has raised in place of clipping.
    """

    reported: float = 0.0
    model: float = 0.0
    optimizer: float = 0.0
    error: str = ""


def clip_and_compare(chunks, optimizer, from_all_ranks):
    """Clip as the largest logits of a pass ask for: the Differences."""
    run(chunks)
    layers, largest = set_threshold(chunks)
    params = [
        (name, param, layer.config, logits)
        for layer, logits in zip(layers, largest, strict=True)
        for name, param in scaled_params(layer)
    ]
    before = [whole(optimizer, param) for _, param, *_ in params]
    maximum = max(from_all_ranks(max(float(logits.max()) for logits in largest)))
    reported, error = clip(chunks)
    if errors := [one for one in from_all_ranks(error) if one]:
        return Differences(error=errors[0])
    model_errors, optimizer_errors, factors = [0.0], [0.0], [1.0]
    for (name, param, config, logits), old in zip(params, before, strict=True):
        right = [scale_by_rule(config, name, weight, logits, config.qk_clip_threshold) for weight in old]
        new = whole(optimizer, param)
        model_errors.append(relative_difference(new[0], right[0]))
        optimizer_errors.append(relative_difference(new[1], right[1]))
        factors.append(float((right[1] / old[1]).nan_to_num(1.0).min()))
    assert min(from_all_ranks(min(factors))) < 0.95, "no weight is to be scaled"
    return Differences(
        reported=max(from_all_ranks(abs(reported - maximum))),
        model=max(from_all_ranks(max(model_errors))),
        optimizer=max(from_all_ranks(max(optimizer_errors))),
    )


def clip(chunks):
    try:
        return qk_clip.clip_qk(chunks), ""
    except (AssertionError, AttributeError, RuntimeError) as error:
        return None, type(error).__name__


def relative_difference(actual, right):
    return float(((actual.double() - right).abs() / right.abs()).nan_to_num(0.0).max())


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_weights_are_those_of_the_rule(start, from_all_ranks, unpatched, training, record_property, pytestconfig):
    chunks, optimizer = start(training)
    copies = 1 if "PP" in training.layout else 2
    layers = sum(from_all_ranks(len(list(attention_layers(chunks)))))
    assert layers == copies * ((4 if training.layout == "VPP2" else 2) + training.heads)
    differences = clip_and_compare(chunks, optimizer, from_all_ranks)
    assert (differences.error, differences.reported) == ("", 0.0)
    assert all(layer.core_attention.current_max_attn_logits is None for layer in attention_layers(chunks))
    assert differences.model < (2.0**-8 if chunks[0].config.bf16 else 1e-6)
    assert differences.optimizer < (2.0**-8 if training.optimizer == "remainders" else 1e-6)
    row = {"patched": differences.optimizer}
    if pytestconfig.option.write_tables:
        with unpatched():
            plain = clip_and_compare(*build(training), from_all_ranks)
        row["unpatched"] = plain.error or plain.optimizer
    record_property("qk_clip", [str(training), row])


def test_training_keeps_the_logits_of_all_layers_near_the_threshold(start, unpatched, record_property, pytestconfig):
    """Muon with a learning rate at which logits grow without end."""

    def clip_as_megatron(chunks):
        with unpatched():
            qk_clip.clip_qk(chunks)

    ways = {"not clipped": lambda chunks: None, "clipped": qk_clip.clip_qk}
    if pytestconfig.option.write_tables:
        ways["clipped by Megatron"] = clip_as_megatron
    measured = {}
    for way, clip_after_step in ways.items():
        chunks, optimizer = start(Training("grouped", "DP2", "layer-wise", 1))
        for layer in attention_layers(chunks):
            layer.config.qk_clip_threshold = 20.0
        measured[way] = train(chunks, optimizer, 20, 0.05, clip_after_step)
    for way, (loss, logits) in sorted(measured.items()):
        record_property("qk_clip_training", [way, {"loss": loss, "logits": logits}])
    assert max(measured["clipped"][1]) < 40.0 < 100.0 < min(measured["not clipped"][1])


def test_muon_does_not_stall_with_all_of_it_on(start):
    """The gradients of one weight are 1e12 times too large, --clip-grad is 1, and fused weights are split."""
    chunks, optimizer = start(Training("grouped", "DP2", "layer-wise, split", 1))

    def explode():
        params = dict(chunks[0].named_parameters())
        next(param for name, param in params.items() if name.endswith("linear_proj.weight")).main_grad.mul_(1e12)

    settings = {"rate": 0.02, "clip": qk_clip.clip_qk, "before_step": explode}
    first, _ = train(chunks, optimizer, steps=1, **settings)
    last, _ = train(chunks, optimizer, steps=15, **settings)
    assert last < 0.5 * first


@pytest.mark.parametrize("log_max_only", [False, True])
def test_replicas_that_ran_other_layers_stay_alike(start, rank, from_all_ranks, log_max_only):
    """As those of a multimodal model of which some have no images."""
    chunks, _ = start(Training("grouped", "DP2", "bf16"))
    layers = list(attention_layers(chunks))
    for layer in layers:
        layer.core_attention.current_max_attn_logits = None
        layer.config.qk_clip_threshold = 100.0
    logits = ([200.0, 10.0, 10.0, 10.0], [10.0, 10.0, 10.0, 150.0])[rank]
    layers[rank].core_attention.current_max_attn_logits = torch.tensor(logits)
    before = [layer.linear_qkv.weight.clone() for layer in layers]
    assert qk_clip.clip_qk(chunks, log_max_only) == 200.0
    for layer, old in zip(layers, before, strict=True):
        first, second = from_all_ranks(layer.linear_qkv.weight.detach().float())
        assert torch.equal(first, second)
        assert torch.equal(layer.linear_qkv.weight, old) is log_max_only


def test_frozen_weights_are_left_alone(start):
    chunks, _ = start(Training("grouped", "DP2", "bf16", 1))
    for param in chunks[0].module.module.decoder.parameters():
        param.requires_grad = False
    run(chunks)
    layers, _ = set_threshold(chunks)
    layers[0].config.qk_clip_threshold = 1e-3
    before = [layer.linear_qkv.weight.clone() for layer in layers]
    qk_clip.clip_qk(chunks)
    same = [torch.equal(weight, layer.linear_qkv.weight) for weight, layer in zip(before, layers, strict=True)]
    assert same == [True, True, False]


@pytest.mark.parametrize("logit, clipped", [(-1.0, [1]), (0.0, [1]), (math.nan, []), (math.inf, [])])
def test_what_cannot_divide_the_threshold_makes_no_nan(start, logit, clipped):
    chunks, _ = start(Training("multi-head", "DP2", "fp32"))
    layer = next(attention_layers(chunks))
    run(chunks)
    layer.config.qk_clip_threshold = 1.0
    layer.core_attention.current_max_attn_logits = torch.tensor([logit, 2.0, 0.5, -3.0])
    weight = layer.linear_qkv.weight
    before = weight.clone()
    assert math.isfinite(qk_clip.clip_qk(chunks)) is math.isfinite(logit)
    rows = HIDDEN // HEADS * 3
    parts = enumerate(zip(before.split(rows), weight.split(rows), strict=True))
    assert [head for head, (old, new) in parts if not torch.equal(old, new)] == clipped
    assert math.isfinite(float(weight.sum()))


def test_validation_and_the_last_step_leave_no_logits_behind(start):
    chunks, _ = start(Training("grouped", "DP2", "bf16", 1))
    run(chunks)
    largest = qk_clip.clip_qk(chunks, log_max_only=True)
    chunks[0].eval()
    with torch.no_grad():
        for layer in attention_layers(chunks):
            layer.linear_qkv.weight.mul_(2.0)
        run(chunks)
        for layer in attention_layers(chunks):
            layer.linear_qkv.weight.mul_(0.5)
    chunks[0].train()
    run(chunks)
    logits = [layer.core_attention.current_max_attn_logits for layer in attention_layers(chunks)]
    assert not any(one.requires_grad for one in logits)
    assert qk_clip.clip_qk(chunks, log_max_only=True) == largest
    assert qk_clip.clip_qk(chunks, log_max_only=True) == 0.0
