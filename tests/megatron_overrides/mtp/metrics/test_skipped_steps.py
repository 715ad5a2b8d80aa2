"""The mean MTP loss of the log line leaves out skipped steps."""

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.mtp.metrics import logged_losses
from megatron_overrides.norms.step_state import StepState

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("skip-update-on-large-grad-norm")]


@pytest.fixture
def track():
    """track(loss) logs one MTP head's loss of one step; returns the running sums of the log line."""
    sums = {}

    def run(loss):
        save = getattr(MTPLossLoggingHelper, "save_loss_to_tracker", None)
        if save is not None:
            save(torch.tensor(loss), 0, 1)
        else:
            counts = (torch.tensor(1.0), torch.tensor(2.0))
            MTPLossLoggingHelper.save_metrics_to_tracker(torch.tensor(loss), *counts, 0, 1)
        MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, None, None, sums)
        return {name: float(value) for name, value in sums.items()}

    yield run
    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def record(monkeypatch):
    step_state = StepState()
    monkeypatch.setattr(logged_losses, "last_step_state", lambda: step_state)
    return step_state


def test_a_skipped_step_adds_nothing(track, record):
    for loss, skips, expected in ((2.0, 0, 2.0), (5.0, 1, 2.0), (3.0, 0, 5.0)):
        record.steps, record.skips = 1, skips
        assert track(loss)["mtp_1 loss"] == expected


def test_a_call_for_several_steps_adds_their_losses_unless_all_were_skipped(track, record):
    for loss, skips, expected in ((2.0, 1, 2.0), (5.0, 3, 2.0), (3.0, 2, 5.0)):
        record.steps, record.skips = 3, skips
        assert track(loss)["mtp_1 loss"] == expected
        assert (record.steps, record.skips) == (0, 0)


def test_a_framework_with_an_empty_dictionary_gets_the_losses_of_a_skipped_step(track, record):
    """It reports them as they are; verl's are of the step that follows the skipped one."""
    record.steps = record.skips = 1
    assert track(2.0)["mtp_1 loss"] == 2.0


def test_without_a_step_of_the_optimizer_losses_are_added(track, record):
    assert track(2.0)["mtp_1 loss"] == 2.0
