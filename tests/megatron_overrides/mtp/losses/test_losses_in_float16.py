"""In float16 the gradient of detached heads neither vanishes nor overflows where that of attached heads does not."""

import pytest
import torch
from megatron_mtp_patches.functional import mtp_loss

from tests.trainings.heads import LENGTH, VOCABULARY, HeadTraining

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("detach-mtp-heads")]

TOKENS, HIDDEN, ROWS = 4096, 32, 24


class OutputLayer(torch.nn.Module):
    gather_output = False

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return hidden @ self.weight.t(), None


@pytest.fixture
def problem():
    """problem(distance): (gradient(detach, loss_scale), the exact one) of a head so far from the main model."""

    def make(distance):
        generator = torch.Generator(torch.get_default_device()).manual_seed(3)
        weight = 0.1 * torch.randn(TOKENS, HIDDEN, generator=generator) / HIDDEN**0.5
        main, noise = torch.randn(2, ROWS, 1, HIDDEN, generator=generator)
        head = torch.zeros_like(main)
        head[:-1] = main[1:] + distance * noise[1:]
        weight, main, head = (each.half() for each in (weight, main, head))
        labels, mask = torch.zeros(1, ROWS, dtype=torch.int64), torch.ones(1, ROWS)

        def gradient(detach, loss_scale):
            hidden = head.clone().requires_grad_()
            settings = {"loss_type": "kl", "chunk_size": 16, "detach_output_layer": detach}
            actual = mtp_loss(main, [hidden], labels, mask, OutputLayer(weight.clone()), **settings)
            (loss_scale * actual.loss).backward()
            return hidden.grad.double() / loss_scale

        exact = head.double().requires_grad_()
        p, q = ((rows.double() @ weight.double().t()).log_softmax(-1) for rows in (main[1:], exact[:-1]))
        (p.exp() * (p - q)).sum(-1).mean().backward()
        return gradient, exact.grad

    return make


@pytest.mark.parametrize("distance", [0.5, 0.02, 0.002])
def test_the_gradient_of_kl_is_as_near_to_float64_as_that_of_attached_heads(problem, distance):
    """The divergence is 1e-3, 2e-6 and 2e-8; at the smallest, entries of the gradient of the logits are about 1e-8."""
    gradient, exact = problem(distance)
    attached, detached = ((gradient(detach, 2.0**16) - exact).norm() / exact.norm() for detach in (False, True))
    assert detached < max(1.2 * attached, 1e-3)


def test_a_gradient_that_is_too_large_for_float16_is_not_finite(problem):
    gradient, _ = problem(0.5)
    assert not any(gradient(detach, 2.0**40).isfinite().all() for detach in (False, True))


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "attached"])
def test_an_overflow_in_the_heads_skips_the_update_and_halves_the_loss_scale(make_gpt, detached):
    half = {"fp16": True, "params_dtype": torch.float16}
    model = make_gpt(
        VOCABULARY,
        LENGTH,
        mtp_loss_type="kl",
        mtp_detach_heads=detached,
        mtp_loss_scaling_factor=1e12,  # the gradients of the heads are too large, those of the main model are not
        **half,
    )
    training = HeadTraining([model], **half, initial_loss_scale=1024.0, hysteresis=1)
    model.config.grad_scale_func = training.optimizer.scale_loss
    before = {name: tensor.clone() for name, tensor in training.heads().items()}
    training.run_schedule(0)
    updated, _, _ = training.optimizer.step()
    assert not updated and float(training.optimizer.get_loss_scale()) == 512
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.heads().items())
    model.config.mtp_loss_scaling_factor = 0.1
    training.step(1)
