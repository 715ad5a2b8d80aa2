"""Norms, clip factors and skipped updates of random optimizers on one rank, against plain torch on whole vectors."""

import math

import pytest
import torch
from hypothesis import given

from tests.oracles.reference_norms import about, assert_close
from tests.trainings.random_optimizers import STEPS, Built, cases, examples

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("skip-update-on-large-grad-norm", "clip-mtp-grads-separately", "clip-named-groups-separately"),
]


@examples(250)
@given(case=cases())
def test_a_step_is_the_reference_step(case):
    """What it returns and reports, and what each parameter is updated with."""
    from megatron_overrides.norms.step_state import last_step_state

    built = Built(case)
    optimizer = built.optimizer
    for step in range(STEPS):
        expected = built.reference_step(step)
        updated, norm, zeros = optimizer.step()
        decision = last_step_state().decision
        assert (updated, decision.skips_update) == (expected.updated, not expected.updated)
        assert decision.skips_mtp is expected.heads_dropped
        if case.needs_norms:
            assert norm == about(expected.norm)
            assert optimizer.grad_norms_by_group == about(expected.norms_of_groups)
        else:
            assert (norm, optimizer.grad_norms_by_group) == (case.not_measured[0], {})
        assert zeros == (expected.zeros if case.count_zeros else case.not_measured[1])
        assert optimizer.has_grad_norm_group("mtp") is bool(expected.norms_of_groups)
        assert_close(built.updated_with(), built.shards_of(expected.used))


@examples(80)
@given(case=cases())
def test_clip_grad_norm_is_the_reference_without_thresholds(case):
    built = Built(case)
    for step in range(STEPS):
        expected = built.reference_step(step, grad_norm_skip_threshold=math.inf, mtp_grad_norm_skip_threshold=math.inf)
        built.optimizer.prepare_grads()
        assert built.optimizer.clip_grad_norm(dict(case.settings)["clip_grad"]) == about(expected.norm)
        assert built.optimizer.grad_norms_by_group == about(expected.norms_of_groups)
        left = [torch.zeros_like(param) if param.grad is None else param.grad for param in built.params()]
        assert_close(left, built.shards_of(expected.used))
