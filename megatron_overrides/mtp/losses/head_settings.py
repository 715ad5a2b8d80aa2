"""The settings of the heads' losses, from the configuration and the forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.mtp.forward_pass import ForwardPass
from megatron_overrides.mtp.losses.checks import depth_weights, dpace_alpha
from megatron_overrides.settings.checks import check, declared_settings

# Rows of logits at a time if --mtp-logits-chunk-size is not set.
DEFAULT_CHUNK_SIZE = 1024


class HeadSettings(NamedTuple):
    """The settings of the losses of this forward pass.

    Attributes:
        objective: "cross_entropy", "kl", "tv" or "lk"; None to compare the heads with the main model and no more.
        is_end_to_end: the loss is of the accepted prefixes, not of each head.
        depth_weights: [D], their mean is 1.
        dpace_alpha: that of the weights of the positions; None where all weigh the same.
        chunk_size: rows of logits at a time, those of the main model and of the heads together.
        is_chunked: the loss is computed chunk by chunk; otherwise from the logits of all positions at once.
        counts_labels: count how often each head predicts the label.
        measures_lengths: measure the accepted lengths, for which the main model's logits are needed.
    """

    objective: str | None
    is_end_to_end: bool
    depth_weights: tuple[float, ...]
    dpace_alpha: float | None
    chunk_size: int
    is_chunked: bool
    counts_labels: bool
    measures_lengths: bool

    @property
    def compares(self) -> bool:
        """True if the main model's logits are needed."""
        return self.objective != "cross_entropy" or self.measures_lengths

    @classmethod
    def read(cls, config: Any, is_training: bool, forward_pass: ForwardPass) -> HeadSettings:
        """Read a TransformerConfig; settings of a patch that is not applied have their defaults.

        They are checked once more: a loop may have changed them since the model was built.
        """
        check(config, declared_settings(type(config)))
        loss_type = getattr(config, "mtp_loss_type", "cross_entropy")
        compares = loss_type != "cross_entropy"
        length_interval = getattr(config, "mtp_acceptance_length_interval", None)
        if forward_pass.metrics is not None:
            counts_labels, measures_lengths = True, length_interval is not None
        else:
            counts_labels = is_training and _falls_due(getattr(config, "mtp_acceptance_interval", 1))
            measures_lengths = is_training and length_interval is not None and (compares or _falls_due(length_interval))
        return cls.create(
            loss_type,
            depth_weights(getattr(config, "mtp_depth_weights", None), config.mtp_num_layers),
            dpace_alpha(config),
            getattr(config, "mtp_logits_chunk_size", 0),
            # Where mtp-acceptance-rate is not applied and Megatron has no acceptance rate, nothing could log it.
            counts_labels=counts_labels and hasattr(mtp, "_compute_mtp_acceptance_counts"),
            measures_lengths=measures_lengths,
        )

    @classmethod
    def create(
        cls,
        loss_type: str,
        weights: tuple[float, ...],
        alpha: float | None,
        chunk_size: int,
        counts_labels: bool,
        measures_lengths: bool,
    ) -> HeadSettings:
        """Build from the values of the settings; with a `chunk_size` of 0 the loss type decides."""
        compares = loss_type != "cross_entropy"
        return cls(
            objective="tv" if loss_type == "e2e_tv" else loss_type,
            is_end_to_end=loss_type == "e2e_tv",
            depth_weights=weights,
            dpace_alpha=alpha,
            chunk_size=chunk_size or DEFAULT_CHUNK_SIZE,
            is_chunked=bool(chunk_size) or compares or (measures_lengths and not torch.is_grad_enabled()),
            counts_labels=counts_labels,
            measures_lengths=measures_lengths,
        )


def _falls_due(interval: int) -> bool:
    """True if this step is one of those that are `interval` steps apart; 0 stands for no step."""
    return bool(interval) and mtp.MTPLossLoggingHelper.tracker.get("steps", 0) % interval == 0
