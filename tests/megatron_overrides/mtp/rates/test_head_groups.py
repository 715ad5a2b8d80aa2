"""MTP heads with another learning rate or weight decay than the main model have parameter groups of their own."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_overrides.mtp.rates.head_groups import Rates, changed_settings, separate_heads

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-at-own-rate")]
RUN = {"optimizer": "adam", "lr": 0.1, "min_lr": 0.01, "weight_decay": 0.5}


@pytest.fixture
def model(make_gpt):
    return make_gpt(16, 8)


def make_groups(model, **settings):
    config = OptimizerConfig(**RUN, **settings)
    return _get_param_groups([model], config, get_standard_config_overrides(config))


def of_heads(model, group):
    heads = {id(param) for param in model.mtp.parameters()}
    return {id(param) in heads for param in group["params"]}


def test_without_a_setting_there_is_no_other_group(model):
    assert any(of_heads(model, group) == {False, True} for group in make_groups(model))


@pytest.mark.parametrize(
    "settings, changed",
    [
        ({"mtp_lr": 0.4}, {"max_lr": 0.4, "min_lr": 0.01, "default_config": False}),
        ({"mtp_lr": 0.4, "mtp_min_lr": 0.2}, {"max_lr": 0.4, "min_lr": 0.2, "default_config": False}),
        ({"mtp_min_lr": 0.02}, {"max_lr": 0.1, "min_lr": 0.02, "default_config": False}),
        ({"mtp_weight_decay": 0.7}, {"max_lr": 0.1, "min_lr": 0.01, "start_wd": 0.7, "end_wd": 0.7}),
    ],
)
def test_each_parameter_is_in_one_group_of_its_kind(model, settings, changed):
    groups = make_groups(model, **settings)
    params = [param for group in groups for param in group["params"]]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    for group in groups:
        (is_of_heads,) = of_heads(model, group)
        assert ({name: group.get(name) for name in changed} == changed) is is_of_heads
    plain = {(group["wd_mult"], group["is_expert_parallel"]) for group in make_groups(model)}
    assert {(group["wd_mult"], group["is_expert_parallel"]) for group in groups} == plain
    assert len(groups) == 2 * len(plain)


def test_the_schedule_and_the_weight_decay_are_those_of_the_heads(model):
    groups = make_groups(model, mtp_lr=0.4, mtp_min_lr=0.2, mtp_weight_decay=0.7)
    optimizer = SimpleNamespace(param_groups=groups)
    decay = {"start_wd": 0.5, "end_wd": 0.5, "wd_incr_steps": 8, "wd_incr_style": "constant"}
    schedule = {"lr_warmup_steps": 2, "lr_decay_steps": 8, "lr_decay_style": "linear"}
    scheduler = OptimizerParamScheduler(optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.01, **schedule, **decay)
    for step, (main, heads) in enumerate([(0.0, 0.0), (0.05, 0.2), (0.1, 0.4)]):
        if step:
            scheduler.step(1)
        for group in groups:
            (is_of_heads,) = of_heads(model, group)
            assert group["lr"] == pytest.approx(heads if is_of_heads else main)
            assert group["weight_decay"] == (0.7 if is_of_heads else 0.5) * group["wd_mult"]
    scheduler.step(20)
    assert {group["lr"] for group in groups} == {0.01, 0.2}


def test_a_multiplier_of_mup_is_kept_and_a_decoupled_rate_is_not():
    config = SimpleNamespace(lr=0.1, min_lr=0.01, decoupled_lr=0.9)
    wider = changed_settings({"max_lr": 0.05, "min_lr": 0.005}, Rates(0.4, None, None), config)
    assert (wider["max_lr"], wider["min_lr"]) == (0.2, 0.005)
    for is_embedding, rate in ((True, 0.4), (False, 3.6)):  # a matrix of mu-P may happen to have the decoupled rate
        param = SimpleNamespace(is_embedding_or_output_parameter=is_embedding)
        group = {"max_lr": 0.9, "min_lr": 0.3, "params": [param]}
        decoupled = changed_settings(group, Rates(0.4, None, None), config)
        assert decoupled["max_lr"] == pytest.approx(rate)
    assert decoupled["min_lr"] == pytest.approx(0.09)


def test_a_decoupled_rate_and_that_of_heads_go_together(make_gpt):
    model = make_gpt(16, 8, tied=False)
    model.mtp.layers[0].eh_proj.weight.is_embedding_or_output_parameter = True
    groups = make_groups(model, mtp_lr=0.4, decoupled_lr=0.9)
    rate = {id(param): group["max_lr"] for group in groups for param in group["params"]}
    assert rate[id(model.output_layer.weight)] == 0.9
    assert {rate[id(param)] for param in model.mtp.parameters()} == {0.4}


def test_the_rate_of_heads_that_train_alone_is_the_logged_one(model):
    for name, param in model.named_parameters():
        param.requires_grad = name.startswith("mtp.")
    groups = make_groups(model, mtp_lr=0.4)
    assert all(group["params"] and group["max_lr"] == 0.4 and group["default_config"] for group in groups)


def test_groups_are_the_same_on_ranks_without_heads():
    group = {"params": [1], "max_lr": 0.1, "default_config": True}
    (others, heads) = separate_heads([group], [], lambda _: {"max_lr": 0.4}, lambda flags: [True, True])
    assert (others["params"], heads["params"], heads["max_lr"]) == ([1], [], 0.4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mtp_lr": -1.0}, "--mtp-lr .*from 0 on, not -1.0; .* that of --lr "),
        ({"mtp_weight_decay": float("nan")}, "--mtp-weight-decay .*from 0 on, not nan;.* that of --weight-decay "),
        ({"mtp_weight_decay": float("inf")}, "--mtp-weight-decay .*finite number from 0 on, not inf;"),
        ({"mtp_lr": True}, "--mtp-lr .*from 0 on, not True;"),
        ({"mtp_lr": 0.001}, "would rise from 0.001 .* to 0.01 .*give --mtp-min-lr.*, 0.001 or less"),
        ({"mtp_min_lr": 0.2}, "would rise from 0.1 .* to 0.2"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**RUN, **settings)
