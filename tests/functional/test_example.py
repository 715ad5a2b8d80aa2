"""The training step of docs/functional.md runs as it is printed, and equals the patched Megatron to the bit."""

import re
from pathlib import Path

import pytest
import torch
from megatron_mtp_patches import functional

pytestmark = pytest.mark.forked("patched")

PAGE = Path(__file__).parents[2] / "docs" / "functional.md"
STEPS = 4


@pytest.fixture(scope="module")
def train_step():
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def train_step" in block
    )
    assert len([line for line in code.splitlines() if line]) <= 30
    names = {}
    exec(code, names)
    return names["train_step"]


def parameters(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def patched_step(model, optimizer, tokens, positions, attention_mask, loss_mask):
    """The same step by the patched Megatron."""
    labels, loss_mask = functional.roll(tokens), functional.roll(loss_mask)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    main = model(tokens, positions, attention_mask, labels=labels, loss_mask=loss_mask)
    ((main * loss_mask).sum() / loss_mask.sum()).backward()
    model.finish_grad_sync()
    return optimizer.step()[0]


def test_a_step_that_overflows_changes_nothing(make_training, batch, train_step, monkeypatch):
    model, optimizer = make_training(mtp_detach_heads=True)
    before = parameters(model)
    monkeypatch.setattr(optimizer, "prepare_grads", lambda: True)
    taken, logged = train_step(model, optimizer, *batch)
    after = parameters(model)
    assert not taken and "mtp_1 loss" in logged
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("threshold", [float("inf"), 1e-3])
@pytest.mark.parametrize("tied", [False, True])
def test_it_equals_the_patched_megatron(make_training, batch, unpatched, train_step, tied, threshold):
    model, optimizer = make_training(tied=tied, mtp_detach_heads=True, mtp_loss_type="tv")
    optimizer.config.mtp_clip_grad, optimizer.config.grad_norm_skip_threshold = 0.05, threshold
    before = parameters(model)
    taken = [patched_step(model, optimizer, *batch) for _ in range(STEPS)]
    expected, norm = parameters(model), optimizer.mtp_grad_norm
    with unpatched():
        model, optimizer = make_training(tied=tied)
        assert all(map(functional.is_mtp_parameter, functional.tag(model, optimizer)))
        optimizer.config.mtp_clip_grad, optimizer.config.grad_norm_skip_threshold = 0.05, threshold
        results = [train_step(model, optimizer, *batch) for _ in range(STEPS)]
    assert [result[0] for result in results] == taken == [threshold > 1] * STEPS
    actual = parameters(model)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
        assert torch.equal(actual[name], before[name]) == (threshold < 1), name
    logged = results[-1][1]
    assert logged["mtp grad norm"] == norm and 1 < logged["mtp acceptance length"] < 3
