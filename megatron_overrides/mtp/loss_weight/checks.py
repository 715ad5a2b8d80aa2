"""Refuse schedules of the MTP loss that cannot work, and warn of one that hardly acts."""

from __future__ import annotations

import functools
import logging
from typing import Any

from megatron_overrides.mtp.heads.detached_heads import are_detached
from megatron_overrides.mtp.loss_weight.schedule import NAME, STYLE, Schedule
from megatron_overrides.settings.checks import captures_whole_iteration, refuse_others, spell

logger = logging.getLogger(__name__)


def check_schedule(settings: Any) -> None:
    """Raise ValueError if the schedule cannot be read, or a CUDA graph would repeat the weight of one step."""
    text = getattr(settings, NAME, None)
    if text is None:
        return
    others = ("disable_mtp_loss", False, "trains without the loss")
    refuse_others(settings, NAME, "changes the weight of the MTP loss", others)
    Schedule.parse(text, getattr(settings, STYLE, "step"))
    if captures_whole_iteration(settings):
        raise ValueError(
            f"{spell(NAME)} changes the weight of the MTP loss, but a CUDA graph of the whole iteration repeats that "
            f"of the step that it was captured in: leave one of the two out"
        )


def check_heads_to_schedule(settings: Any) -> None:
    """Raise ValueError if there is no head. Megatron may read `mtp_num_layers` late, from a hybrid model's pattern."""
    if getattr(settings, NAME, None) is not None and not getattr(settings, "mtp_num_layers", None):
        raise ValueError(f"{spell(NAME)} requires MTP heads: add {spell('mtp_num_layers')}")


def warn_of_normalized_updates(settings: Any) -> None:
    """Log one line if the weight scales gradients whose size does not matter to the optimizer.

    Args:
        settings: the configurations of the model and of the optimizer in one.
    """
    if getattr(settings, NAME, None) is not None and are_detached(settings) and settings.optimizer != "sgd":
        _warn_of_normalized_updates(settings.optimizer)


@functools.cache  # Megatron also asks for the groups of the experts
def _warn_of_normalized_updates(optimizer: str) -> None:
    from megatron.core.utils import log_single_rank

    text = (
        f"{spell(NAME)} hardly acts: no gradient of the MTP loss leaves the heads, so its weight scales their own "
        f"gradients alone, and the updates of {optimizer} do not depend on the size of gradients. For larger or "
        f"smaller updates of the heads set {spell('mtp_lr')}"
    )
    log_single_rank(logger, logging.WARNING, text)
