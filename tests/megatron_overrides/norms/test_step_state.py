"""What is published of a step: counters, warnings, metrics and upstream's attributes, for each optimizer separately."""

import gc
import logging
from types import SimpleNamespace

import pytest

from megatron_overrides.norms.step_decision import Excess, StepDecision
from megatron_overrides.norms.step_state import last_step_state, publish, set_norms, step_state_of
from megatron_overrides.norms.values import Census, GradNorms
from megatron_overrides.report.metrics import step_metrics

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm")]

SKIPPED = StepDecision(Excess(3.25, 2.0))


class Optimizer:
    def __init__(self, **settings):
        self.config = SimpleNamespace(**settings)


def norms(census=None, **by_group):
    total = {None: 1.0, **by_group}
    return GradNorms(total, total, census)


def texts(optimizer):
    return [metric.text for metric in step_metrics(step_state_of(optimizer))]


def test_skipped_updates_are_counted_and_shown():
    optimizer = Optimizer(grad_norm_skip_threshold=2.0, mtp_grad_norm_skip_threshold=None)  # and no MTP heads
    for decision in (StepDecision(), SKIPPED, SKIPPED, StepDecision()):
        publish(optimizer, norms(), decision)
    assert texts(optimizer) == [" updates skipped for grad norm:   2 |"]
    assert next(step_metrics(step_state_of(optimizer))).tag == "updates-skipped-for-grad-norm"


def test_without_a_threshold_no_count_is_shown():
    optimizer = Optimizer()
    publish(optimizer, norms(mtp=2.0))
    assert texts(optimizer) == [" mtp grad norm: 2.000 |"]


def test_a_norm_that_is_measured_after_the_step_is_not_shown():
    optimizer = Optimizer()
    publish(optimizer, norms(mtp=2.0))
    set_norms(optimizer, norms(mtp=3.0))
    assert texts(optimizer) == [" mtp grad norm: 2.000 |"]


def test_a_skip_is_a_warning_that_names_norm_threshold_and_count(caplog):
    with caplog.at_level(logging.WARNING):
        publish(Optimizer(grad_norm_skip_threshold=2.0), norms(), SKIPPED)
    assert "grad norm 3.25" in caplog.text
    assert "--grad-norm-skip-threshold 2 " in caplog.text
    assert "1 skipped so far" in caplog.text


def test_a_skip_for_nan_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        publish(Optimizer(grad_norm_skip_threshold=2.0), norms(), StepDecision(Excess(float("nan"), 2.0)))
    assert "grad norm is NaN, which also counts as over --grad-norm-skip-threshold 2 " in caplog.text


def test_a_step_that_measured_nothing_shows_no_norm_of_the_step_before():
    optimizer = Optimizer(grad_norm_skip_threshold=2.0, mtp_grad_norm_skip_threshold=None)
    census = Census(frozenset([None, "mtp"]), has_clipped=True, has_exempt=True)
    step_state_of(optimizer).census = census
    publish(optimizer, norms(census, mtp=2.0), SKIPPED)
    assert optimizer.grad_norms_by_group == {"mtp": 2.0} and optimizer.clippable_grad_norms == {None: 1.0, "mtp": 2.0}
    counts = [" updates skipped for grad norm:   1 |", " mtp updates skipped for grad norm:   0 |"]
    assert texts(optimizer) == [" mtp grad norm: 2.000 |", " clippable grad norm: 1.000 |", *counts]
    publish(optimizer, decision=StepDecision(overflowed=True))
    assert optimizer.grad_norms_by_group == optimizer.clippable_grad_norms == {}
    assert step_state_of(optimizer).decision.skips_update and step_state_of(optimizer).skips == 2
    assert texts(optimizer) == counts


@pytest.mark.parametrize("setting", ["mtp_clip_grad", "mtp_grad_norm_skip_threshold"])
def test_a_setting_for_heads_that_no_rank_has_is_a_warning_once(setting, caplog):
    """As with OptimizerConfig(mtp_clip_grad=1.0) in a framework that tags no heads."""
    optimizer, with_heads = Optimizer(**{setting: 1.0}), Optimizer(**{setting: 1.0})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            publish(optimizer, norms())
        publish(with_heads, norms(mtp=1.0))
    assert caplog.text.count(f"Config.{setting}) 1 has no effect: no rank has MTP heads") == 1


def test_two_optimizers_do_not_mix():
    actor, critic = Optimizer(grad_norm_skip_threshold=2.0), Optimizer(grad_norm_skip_threshold=2.0)
    publish(actor, norms(), SKIPPED)
    publish(critic, norms(), StepDecision())
    assert step_state_of(actor).decision.skips_update and not step_state_of(critic).decision.skips_update
    assert [step_state_of(one).skipped_updates.total for one in (actor, critic)] == [1, 0]
    assert last_step_state() is step_state_of(critic)


def test_the_record_goes_with_its_optimizer():
    optimizer = Optimizer()
    publish(optimizer, norms(), SKIPPED)
    del optimizer
    gc.collect()
    assert not last_step_state().decision.skips_update
