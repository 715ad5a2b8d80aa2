"""Every number that the patches add to a log: its name in the log line, its tag for TensorBoard and W&B, its value.

The log line, TensorBoard, W&B, Megatron-Bridge, verl, ms-swift, validation and `megatron_mtp_patches.metrics()` read
this list. The values are measured by norms/ (a step of an optimizer) and mtp/metrics/ (the heads). This module imports
nothing of Megatron at its top, because wrappers import it while modules of Megatron are being imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron_overrides.norms.step_state import StepState

# Returns the settings of the run whose training log is being made: Megatron's arguments, or the configuration of the
# model in Megatron-Bridge and ms-swift. None while no log is.
logged_run: ContextVar[Callable[[], Any] | None] = ContextVar("logged_run", default=None)

MTP_LOSS = re.compile(r"mtp_\d+ loss")


class Metric(NamedTuple):
    """A number of a log.

    Attributes:
        label: its name in the log line and in `megatron_mtp_patches.metrics()`.
        tag: its name in TensorBoard and W&B.
        value: a number or a one-element tensor, which stays on its device until it is printed.
    """

    label: str
    tag: str
    value: Any

    @property
    def text(self) -> str:
        value = f"{self.value:3d}" if isinstance(self.value, int) else f"{float(self.value):.3f}"
        return f" {self.label}: {value} |"


def step_metrics(state: StepState) -> Iterator[Metric]:
    """Yield the metrics of the last step of an optimizer."""
    norms = state.published_norms
    if norms is not None:
        for group, norm in norms.by_group.items():
            yield Metric(f"{group} grad norm", f"{group}-grad-norm", norm)
        if norms.census is not None and norms.census.has_clipped and norms.census.has_exempt:
            yield Metric("clippable grad norm", "clippable-grad-norm", norms.clipping[None])
    if state.may_skip_updates:
        skipped = state.skipped_updates.total
        yield Metric("updates skipped for grad norm", "updates-skipped-for-grad-norm", skipped)
    if state.may_skip_mtp_updates:
        skipped = state.skipped_mtp_updates.total
        yield Metric("mtp updates skipped for grad norm", "mtp-updates-skipped-for-grad-norm", skipped)
    if state.watch_findings is not None:
        yield Metric("watch findings", "watch-findings", state.watch_findings)


def mtp_metrics(
    losses: Iterable[Any] = (),
    rates: Iterable[Any] = (),
    cumulative_rates: Iterable[Any] = (),
    lengths: Iterable[Any] = (),
    scaling_factor: Any = None,
) -> Iterator[Metric]:
    """Yield the metrics of the heads, of which some may not have been measured.

    Args:
        losses: the mean of the trained loss of each head.
        rates: in percent, how often the most likely token of each head is the label.
        cumulative_rates: the same since this process started.
        lengths: the mean accepted length of rejection sampling, and that of greedy verification.
        scaling_factor: the weight of the MTP loss, if a schedule sets it.
    """
    for depth, loss in enumerate(losses, start=1):
        yield Metric(f"mtp_{depth} loss", f"mtp_{depth} loss", loss)
    for depth, rate in enumerate(rates, start=1):
        yield Metric(f"mtp_{depth} acceptance %", f"mtp_{depth}_acceptance_rate", rate)
    for depth, rate in enumerate(cumulative_rates, start=1):
        yield Metric(f"mtp_{depth} acceptance % so far", f"mtp_{depth}_cumulative_acceptance_rate", rate)
    for kind, length in zip(("", "greedy "), lengths, strict=False):
        label = f"mtp {kind}acceptance length"
        yield Metric(label, label.replace(" ", "_"), length)
    if scaling_factor is not None:
        yield Metric("mtp loss scaling factor", "mtp_loss_scaling_factor", scaling_factor)


def training_metrics(optimizer: Any = None) -> list[Metric]:
    """Return the metrics of the last step of `optimizer`, then those of the heads that were measured last.

    Args:
        optimizer: as get_megatron_optimizer returned it; None for the one that stepped last in this process.

    Raises:
        TypeError: `optimizer` is not a Megatron optimizer.
    """
    return [*step_metrics(_state(optimizer)), *mtp_metrics(**_tracker().get("measured_last", {}))]


def step_scalars(optimizer: Any = None) -> dict[str, float]:
    """Return the metrics of the last step by tag. Writers and frameworks get those of the heads from the tracker."""
    return {metric.tag: float(metric.value) for metric in step_metrics(_state(optimizer))}


def end_of_log_line() -> str:
    """Return what the patches add to the log line.

    A loss of a head is added if it is NaN in this log interval: training_log prints one that is >= 0 (0.16: > 0).
    Losses of skipped steps are not in the interval.
    """
    losses = mtp_metrics(losses=_tracker().get("losses_of_log_interval", ()))
    nan_losses = (metric for metric in losses if math.isnan(float(metric.value)))
    return "".join(metric.text for metric in [*nan_losses, *training_metrics()])


def _state(optimizer: Any) -> StepState:
    from megatron_overrides.norms.optimizer_tree import check_optimizer
    from megatron_overrides.norms.step_state import last_step_state, step_state_of

    if optimizer is None:
        return last_step_state()
    check_optimizer(optimizer)
    return step_state_of(optimizer)


def _tracker() -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker
