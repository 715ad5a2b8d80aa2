"""What is counted, logged and shown of skipped updates."""

import logging
import math
from types import SimpleNamespace

import pytest

from megatron_overrides import metrics


@pytest.fixture
def tally():
    from megatron_overrides.core.optimizer.skipped_updates import Tally

    return Tally()


def config(threshold):
    return SimpleNamespace(grad_norm_skip_threshold=threshold)


class OnTheGpu(float):
    """A norm that must not be read on the host."""

    def __le__(self, other):
        raise AssertionError("the norm was read")

    __gt__ = __lt__ = __ge__ = __le__


def test_an_infinite_threshold_never_reads_the_norm(tally):
    assert tally.skips(OnTheGpu(1.0), config(math.inf)) is False


def test_skipped_updates_are_counted_and_shown(tally):
    for norm in (1.0, 3.0, math.nan, 0.5):
        tally.begin_step()
        tally.skips(norm, config(2.0))
    assert tally.total == 2
    (metric,) = (metric for metric in metrics.shown() if metric.tag == "updates-skipped-for-grad-norm")
    assert metric.value == 2
    assert metric.text == " updates skipped for grad norm:   2 |"


def test_the_next_step_starts_afresh(tally):
    tally.skips(3.0, config(2.0))
    assert tally.last_step_skipped
    tally.begin_step()
    assert not tally.last_step_skipped


def test_a_skip_is_a_warning_that_names_norm_threshold_and_count(tally, caplog):
    with caplog.at_level(logging.WARNING):
        tally.skips(3.25, config(2.0))
    assert "grad norm 3.25" in caplog.text
    assert "--grad-norm-skip-threshold 2 " in caplog.text
    assert "1 skipped so far" in caplog.text
