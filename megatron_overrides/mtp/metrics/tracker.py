"""Add up MTP losses and acceptance counts on the device between two log lines, and reduce them once per step.

NVIDIA/Megatron-LM#3458: MTPLossLoggingHelper of 0.19. The method names of older releases still work, and so does their
key "values" for the losses. Upstream counts in float32, which is rounded above 2**24.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.mtp.metrics.head_metrics import mean_lengths
from megatron_overrides.report.metrics import MTP_LOSS, mtp_metrics

_COUNTS = ("correct_values", "total_values")
_GROUPS = ("reduce_group", "avg_group")


class MTPLossLoggingHelper:
    """Methods that replace those of Megatron's class. The state stays in Megatron's `tracker`."""

    @staticmethod
    def save_metrics_to_tracker(
        loss: torch.Tensor,
        correct: torch.Tensor | None,
        total: torch.Tensor | None,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Any = None,
        avg_group: Any = None,
    ) -> None:
        """Add one microbatch of one MTP depth.

        Args:
            loss: scalar, the mean over the tokens of this rank.
            correct, total: scalars, the correct predictions and all predictions; None if they were not counted.
            layer_number: depth, from 0; None adds nothing.
            reduce_group: losses and counts are summed over it.
            avg_group: losses are averaged over it, counts are summed.
        """
        if layer_number is None:
            return
        tracker = mtp.MTPLossLoggingHelper.tracker
        if "loss_values" not in tracker:
            device = torch.cuda.current_device()
            tracker["loss_values"] = tracker["values"] = torch.zeros(num_layers, device=device)
            for key in _COUNTS:
                tracker[key] = torch.zeros(num_layers, dtype=torch.int64, device=device)
        tracker["loss_values"][layer_number] += loss.detach()
        if correct is not None and total is not None:
            tracker["correct_values"][layer_number] += correct.detach().to(torch.int64)
            tracker["total_values"][layer_number] += total.detach().to(torch.int64)
        tracker["reduce_group"] = reduce_group
        tracker["avg_group"] = avg_group
        # A replayed CUDA graph adds to the sums without calling this method; the groups of the capture stay valid.
        tracker["last_groups"] = (reduce_group, avg_group)
        tracker["counted"] = correct is not None

    @staticmethod
    def clean_metrics_in_tracker() -> None:
        """Reset the losses and the counts of this step; the cumulative counts stay."""
        tracker = mtp.MTPLossLoggingHelper.tracker
        for key in ("loss_values", "length_values", *_COUNTS):
            if key in tracker:
                tracker[key].zero_()
        tracker["measured_lengths"] = False
        for key in _GROUPS:
            tracker[key] = None

    @staticmethod
    def reduce_metrics_in_tracker() -> None:
        """Reduce over the ranks, with one collective per group for each of losses, counts and lengths."""
        tracker = mtp.MTPLossLoggingHelper.tracker
        if "loss_values" not in tracker:
            return
        sum_group, mean_group = (tracker.get(key) for key in _GROUPS)
        if sum_group is None and mean_group is None:
            sum_group, mean_group = tracker.get("last_groups", (None, None))
        counts = torch.stack([tracker[key] for key in _COUNTS])
        for group, op in ((sum_group, torch.distributed.ReduceOp.SUM), (mean_group, torch.distributed.ReduceOp.AVG)):
            if group is not None:
                torch.distributed.all_reduce(tracker["loss_values"], group=group, op=op)
                if tracker.get("counted"):
                    torch.distributed.all_reduce(counts, group=group)
                if tracker.get("measured_lengths"):
                    torch.distributed.all_reduce(tracker["length_values"], group=group)
        for key, values in zip(_COUNTS, counts, strict=True):
            tracker[key].copy_(values)

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float | torch.Tensor,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Any] | None = None,
    ) -> None:
        """Report what was saved since the last call, then reset it.

        Args:
            loss_scale: one over the number of microbatches.
            writer, wandb_writer: they get `mtp_N loss` and, in percent, `mtp_N_acceptance_rate` (of this step) and
                `mtp_N_cumulative_acceptance_rate` (since this process started); `mtp_acceptance_length` and
                `mtp_greedy_acceptance_length` if this step has measured them; `mtp_loss_scaling_factor` if a schedule
                sets it.
            total_loss_dict: `mtp_N loss` is added to it; Megatron, which counts steps in it, prints the means. An empty
                one, which verl and ms-swift report as it is, gets the rates and lengths as well.
        """
        helper = mtp.MTPLossLoggingHelper
        helper.reduce_metrics_in_tracker()
        tracker = helper.tracker
        if "loss_values" not in tracker:
            return
        measured = {"losses": tracker["loss_values"] * loss_scale}
        # ms-swift also reports its evaluation, in which mcore-bridge counts nothing.
        is_report = total_loss_dict is not None and not total_loss_dict
        if tracker.get("counted") and not (is_report and not tracker["total_values"].any()):
            measured |= _acceptance_rates(tracker)
        if tracker.get("measured_lengths"):
            measured["lengths"] = mean_lengths(tracker["length_values"])
        if "scaling_factor" in tracker:
            measured["scaling_factor"] = tracker["scaling_factor"]
        for _, tag, value in mtp_metrics(**measured):
            if total_loss_dict is not None and (is_report or MTP_LOSS.fullmatch(tag)):
                total_loss_dict[tag] = total_loss_dict.get(tag, torch.zeros_like(value)) + value
            if writer is not None:
                writer.add_scalar(tag, value, iteration)
            if wandb_writer is not None:
                wandb_writer.log({tag: value}, iteration)
        del measured["losses"]
        tracker["measured_last"] = tracker.get("measured_last", {}) | measured
        tracker["steps"] = tracker.get("steps", 0) + 1
        helper.clean_metrics_in_tracker()

    @staticmethod
    def save_loss_to_tracker(
        loss: torch.Tensor, layer_number: int | None, num_layers: int, reduce_group: Any = None, avg_group: Any = None
    ) -> None:
        """The method of releases up to 0.18: adds a loss and no counts."""
        mtp.MTPLossLoggingHelper.save_metrics_to_tracker(
            loss, None, None, layer_number, num_layers, reduce_group=reduce_group, avg_group=avg_group
        )

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """The method of releases up to 0.18."""
        mtp.MTPLossLoggingHelper.clean_metrics_in_tracker()

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """The method of releases up to 0.18."""
        mtp.MTPLossLoggingHelper.reduce_metrics_in_tracker()


def _acceptance_rates(tracker: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the rates of this step and of all steps, [D] each, in percent. They stay on the device."""
    step = torch.stack([tracker[key] for key in _COUNTS])
    cumulative = tracker.get("cumulative_counts")
    if cumulative is None or cumulative.shape != step.shape:
        cumulative = torch.zeros_like(step)
    tracker["cumulative_counts"] = cumulative = cumulative + step
    return {
        name: (100.0 * correct.double() / total.clamp(min=1)).float()
        for name, (correct, total) in (("rates", step), ("cumulative_rates", cumulative))
    }
