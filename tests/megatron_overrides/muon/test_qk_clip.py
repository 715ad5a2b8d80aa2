"""QK clipping rescales weights only after an update that happened."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.qk_clip import clip_qk

from megatron_overrides.muon import wrappers
from megatron_overrides.norms.step_decision import Excess, StepDecision
from megatron_overrides.norms.step_record import StepRecord

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def model():
    """The least that clip_qk reads of a model: one layer whose largest logit is 7."""
    attention = SimpleNamespace(clipped=0, core_attention=SimpleNamespace(current_max_attn_logits=torch.tensor([7.0])))
    attention.clip_qk = lambda: setattr(attention, "clipped", attention.clipped + 1)
    layer = SimpleNamespace(self_attention=attention)
    module = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))
    return [SimpleNamespace(module=SimpleNamespace(module=module))]


@pytest.mark.parametrize(
    "decision, clipped", [(StepDecision(), 1), (StepDecision(Excess(2.0, 1.0)), 0), (StepDecision(overflowed=True), 0)]
)
def test_weights_are_rescaled_only_if_the_step_was_taken(model, monkeypatch, decision, clipped):
    record = StepRecord()
    record.decision = decision
    monkeypatch.setattr(wrappers, "last_record", lambda: record)
    assert clip_qk(model, log_max_only=False) == 7.0
    attention = model[0].module.module.decoder.layers[0].self_attention
    assert attention.clipped == clipped


def test_measuring_only_stays_measuring_only(model):
    clip_qk(model, log_max_only=True)
    assert model[0].module.module.decoder.layers[0].self_attention.clipped == 0
