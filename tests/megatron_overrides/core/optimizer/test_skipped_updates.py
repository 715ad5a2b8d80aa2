"""What is counted, logged and shown of skipped updates."""

import logging
import math
from types import SimpleNamespace

import pytest

from megatron_overrides import metrics

pytestmark = pytest.mark.forked("patched")


def config(threshold):
    return SimpleNamespace(grad_norm_skip_threshold=threshold)


class OnTheGpu(float):
    """A norm that must not be read on the host."""

    def __le__(self, other):
        raise AssertionError("the norm was read")

    __gt__ = __lt__ = __ge__ = __le__


def test_an_infinite_threshold_never_reads_the_norm(skipped_updates):
    assert skipped_updates.updates.skips(OnTheGpu(1.0), OnTheGpu(1.0), config(math.inf)) is False


def test_skipped_updates_are_counted_and_shown(skipped_updates):
    for norm in (1.0, 3.0, math.nan, 0.5):
        skipped_updates.begin_step()
        skipped_updates.updates.skips(norm, norm, config(2.0))
    assert skipped_updates.updates.total == 2
    (metric,) = (metric for metric in metrics.shown() if metric.tag == "updates-skipped-for-grad-norm")
    assert metric.value == 2
    assert metric.text == " updates skipped for grad norm:   2 |"


def test_the_next_step_starts_afresh(skipped_updates):
    skipped_updates.updates.skips(3.0, 3.0, config(2.0))
    assert skipped_updates.updates.in_last_step
    skipped_updates.begin_step()
    assert not skipped_updates.updates.in_last_step


def test_a_skip_is_a_warning_that_names_norm_threshold_and_count(skipped_updates, caplog):
    with caplog.at_level(logging.WARNING):
        skipped_updates.updates.skips(3.25, 3.25, config(2.0))
    assert "grad norm 3.25" in caplog.text
    assert "--grad-norm-skip-threshold 2 " in caplog.text
    assert "1 skipped so far" in caplog.text


@pytest.mark.parametrize("whole, skipped", [(1e6, False), (math.nan, True), (math.inf, True)])
def test_what_is_exempt_may_have_any_size_but_must_be_a_number(skipped_updates, whole, skipped):
    assert skipped_updates.updates.skips(1.0, whole, config(2.0)) is skipped
