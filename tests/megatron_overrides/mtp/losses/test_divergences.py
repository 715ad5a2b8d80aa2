"""The divergences between a head and the main model, and their gradients."""

import pytest
import torch

from megatron_overrides.mtp.losses.divergences import OBJECTIVES, Divergence
from megatron_overrides.mtp.losses.vocabulary import Vocabulary

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-for-acceptance")]


def divergence(logits, teacher_logits, objective, size=None):
    vocabulary = Vocabulary(size, None)
    logits = logits.clone().requires_grad_()
    log_p = vocabulary.log_softmax(teacher_logits)[0]
    value, acceptance, token = Divergence.apply(logits, log_p, vocabulary, objective)
    value.sum().backward()
    return value.detach(), acceptance, token, logits.grad


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_head_that_is_the_main_model_gets_no_gradient(objective):
    logits = torch.randn(4, 3, 50)
    value, acceptance, token, gradient = divergence(logits, logits, objective)
    torch.testing.assert_close(value, torch.zeros(4, 3), rtol=0, atol=2e-6)
    torch.testing.assert_close(acceptance, torch.ones(4, 3), rtol=0, atol=2e-6)
    assert torch.equal(token, logits.argmax(-1))
    assert not gradient.any()


def test_a_token_that_both_find_equally_likely_pulls_neither_way():
    """The subgradient of total variation is 0 there, and so is that of the logarithm of the acceptance."""
    logits, teacher = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 2.0, 1.0])
    p, q = teacher.softmax(-1), logits.softmax(-1)
    assert torch.equal(p[:2], q[:2])
    is_short = torch.tensor([0.0, 0.0, 1.0, 0.0])
    expected = q * ((q * is_short).sum() - is_short)
    torch.testing.assert_close(divergence(logits, teacher, "tv")[3], expected)
    acceptance = torch.minimum(p, q).sum()
    torch.testing.assert_close(divergence(logits, teacher, "lk")[3], expected / acceptance)


@pytest.mark.parametrize("gap", [0.0, 10.0, 40.0, 80.0, 86.0])
def test_lk_is_that_of_float64_however_little_is_accepted(gap):
    """The acceptance is about exp(-gap); without a floor and a scale of its own the gradient would vanish with it."""
    generator = torch.Generator().manual_seed(4)
    logits, teacher = torch.randn(2, 6, 50, generator=generator)
    logits[:, :25] += gap
    teacher[:, 25:] += gap
    exact = logits.double().requires_grad_()
    expected = -torch.minimum(exact.softmax(-1), teacher.double().softmax(-1)).sum(-1).log()
    expected.sum().backward()
    value, _, _, gradient = divergence(logits, teacher, "lk")
    for result, wanted in ((value, expected.detach()), (gradient, exact.grad)):
        assert (result - wanted).norm() <= 1e-5 * wanted.norm()
    assert exact.grad.abs().sum(-1).min() > 0.1


@pytest.mark.parametrize("gap", [90.0, 100.0, 1e4])
def test_lk_stays_finite_where_float32_has_no_acceptance(gap):
    logits, teacher = torch.zeros(2, 4)
    logits[0] += gap
    teacher[1] += gap
    value, acceptance, _, gradient = divergence(logits, teacher, "lk")
    assert acceptance < 2e-38 and 87 < value < 88
    assert gradient.isfinite().all() and gradient.abs().sum() <= 2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_columns_of_padding_are_outside_both_distributions(objective):
    logits, teacher = torch.randn(4, 3, 50), torch.randn(4, 3, 50)
    expected = divergence(logits[..., :45], teacher[..., :45], objective)
    logits[..., 45:], teacher[..., 45:] = 30.0, 40.0
    *actual, gradient = divergence(logits, teacher, objective, size=45)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected[:3], strict=True))
    assert torch.equal(gradient[..., :45], expected[3]) and not gradient[..., 45:].any()


def test_a_shard_of_padding_alone_adds_nothing():
    class LastRank:
        def rank(self):
            return 1

    shard = Vocabulary(8, LastRank()).without_padding(torch.full((2, 8), 50.0))
    assert shard.shape == (2, 1) and not shard.exp().any()
