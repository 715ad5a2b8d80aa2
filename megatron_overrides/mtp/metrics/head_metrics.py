"""Metrics of the heads in one microbatch, and their recipient: Megatron's tracker, or an `mtp_pass`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.mtp.losses.token_counts import TokenCounts
from megatron_overrides.report.metrics import Metric, mtp_metrics


class HeadMetrics(NamedTuple):
    """The heads of one microbatch on this rank's tokens.

    Attributes:
        losses: [D], the sum of the trained loss of each head.
        tokens: [D], the positions that count in it.
        counts: [2, D] int64, correct predictions of the labels and all predictions; None if this step counts none.
        lengths: [3] float64, sums over the positions whose heads all count: the expected number of draft tokens that
            rejection sampling accepts, the number that greedy verification accepts, and the positions; None if this
            step measures none.
    """

    losses: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor | None
    lengths: torch.Tensor | None

    def sums(self) -> dict[str, torch.Tensor]:
        """Return what was measured by field."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def accepted_lengths(acceptance: torch.Tensor, agrees: torch.Tensor, chains: torch.Tensor) -> torch.Tensor:
    """Return the `lengths` of HeadMetrics.

    Args:
        acceptance: [D, b, s], the probability that each head's token is accepted.
        agrees: [D, b, s] bool, whether head and main model have the same most likely token.
        chains: [b, s] bool, the positions whose heads all count.
    """
    expected = acceptance.double().cumprod(dim=0).sum(dim=0)
    greedy = agrees.double().cumprod(dim=0).sum(dim=0)
    return torch.stack([(each * chains).sum() for each in (expected, greedy, torch.ones_like(expected))])


def save_to_tracker(metrics: HeadMetrics, counts: TokenCounts) -> None:
    """Add the metrics to Megatron's tracker, which logs them once per step.

    It averages losses over all data- and context-parallel ranks and over the microbatches of a step.

    Args:
        counts: the positions that count, added up over the ranks that share the sequences of the microbatch.
    """
    helper = mtp.MTPLossLoggingHelper
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    depths = len(metrics.losses)
    for depth, (loss, tokens) in enumerate(zip(metrics.losses, counts.by_head(depths), strict=True)):
        mean = loss * (tokens > 0).to(loss.dtype) * counts.ranks / tokens.clamp(min=1)
        if hasattr(helper, "save_metrics_to_tracker"):
            predictions = (None, None) if metrics.counts is None else metrics.counts[:, depth]
            helper.save_metrics_to_tracker(mean, *predictions, depth, depths, avg_group=group)
        else:
            helper.save_loss_to_tracker(mean, depth, depths, avg_group=group)
    if metrics.lengths is not None:
        save_lengths_to_tracker(helper.tracker, metrics.lengths)


def save_lengths_to_tracker(tracker: dict[str, Any], lengths: torch.Tensor) -> None:
    """Add the lengths of one microbatch."""
    if "length_values" not in tracker:
        tracker["length_values"] = torch.zeros_like(lengths)
    tracker["length_values"] += lengths
    tracker["measured_lengths"] = True


class PassMetrics:
    """The metrics of all forward passes inside one `mtp_pass`: means over positions, microbatches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: HeadMetrics) -> None:
        """Add one microbatch."""
        for name, value in metrics.sums().items():
            self._sums[name] = self._sums.get(name, 0) + value.double()

    def reduce(self) -> dict[str, float]:
        """Return the means by name; a collective of the data- and context-parallel ranks of the last pipeline stage.

        Names: `mtp_1 loss`, `mtp_1 acceptance %` (agreement with the labels), `mtp acceptance length` and `mtp greedy
        acceptance length`. Empty on ranks that have no heads' losses.
        """
        return by_label(self.reduce_metrics())

    def reduce_metrics(self) -> list[Metric]:
        """Return the means of `reduce`, each with its tag."""
        if not self._sums:
            return []
        return mean_metrics(self._sums, parallel_state.get_data_parallel_group(with_context_parallel=True))


def mean_metrics(sums: dict[str, torch.Tensor], group: Any) -> list[Metric]:
    """Add the fields of HeadMetrics up over `group` (None: this rank alone) and return the means, as floats."""
    flat = torch.cat([value.double().flatten() for value in sums.values()])
    if group is not None:
        torch.distributed.all_reduce(flat, group=group)
    pieces = flat.cpu().split([value.numel() for value in sums.values()])
    total = dict(zip(sums, pieces, strict=True))
    means = {"losses": total["losses"] / total["tokens"].clamp(min=1)}
    if "counts" in total:
        correct, predictions = total["counts"].chunk(2)
        means["rates"] = 100 * correct / predictions.clamp(min=1)
    if "lengths" in total:
        means["lengths"] = mean_lengths(total["lengths"])
    return [metric._replace(value=metric.value.item()) for metric in mtp_metrics(**means)]


def by_label(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the values by the names that the log line has."""
    return {metric.label: metric.value for metric in metrics}


def mean_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Return [2], the mean accepted lengths, each with the token that the main model adds itself."""
    return 1 + lengths[:2] / lengths[2].clamp(min=1)
