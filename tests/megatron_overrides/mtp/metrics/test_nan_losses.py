"""The loss of a head that is NaN stays in the log line, which drops it otherwise."""

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.report.megatron_log import append_to_log_line, mark_training_log

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("report-nonfinite-mtp-heads")]


@pytest.fixture
def line(monkeypatch):
    """line(losses of the heads in a step, ...): the end of a log line over these steps."""

    monkeypatch.setattr(Helper, "tracker", {})

    def log(*steps):
        def training_log():
            sums = {"advanced iterations": len(steps)}
            for losses in steps:
                for depth, loss in enumerate(losses):
                    Helper.save_metrics_to_tracker(torch.tensor(loss), None, None, depth, len(losses))
                Helper.track_mtp_metrics(1.0, 1, None, None, sums)
            for name in sums:  # as training_log does before it prints
                sums[name] = torch.tensor([0.0])
            return append_to_log_line(Call(lambda message: message, None, (" iteration 1 |",), {}))

        return mark_training_log(Call(training_log, None, (), {}))

    return log


NAN = float("nan")


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        ([(1.0, NAN)], " mtp_2 loss: nan |"),
        ([(NAN, NAN), (1.0, NAN)], " mtp_1 loss: nan | mtp_2 loss: nan |"),  # one step of the interval is enough
        ([(1.0, 2.0)], ""),  # Megatron has printed them
    ],
)
def test_the_line_has_a_loss_of_nan(line, steps, end):
    assert line(*steps) == f" iteration 1 |{end}"


def test_the_next_line_does_not_repeat_it(line):
    assert "nan" in line((NAN,)) and "nan" not in line((1.0,))
