"""Check the settings of the optimizer: each by itself, and those that cannot work together."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.norms.norm_groups import SETTINGS_OF_MTP_GROUP, named_groups
from megatron_overrides.settings.names import check_switches, spell

logger = logging.getLogger(__name__)


def check_settings(settings: Any) -> None:
    """Raise ValueError if `settings` (an OptimizerConfig or Megatron's args) cannot do what they ask for."""
    check_switches(settings, ["clip_orthogonalizing_optimizers"])
    _check_threshold("grad_norm_skip_threshold", getattr(settings, "grad_norm_skip_threshold", math.inf), settings)
    mtp_threshold = getattr(settings, "mtp_grad_norm_skip_threshold", None)
    if mtp_threshold is not None:
        _check_threshold("mtp_grad_norm_skip_threshold", mtp_threshold, settings)
    limit = getattr(settings, "mtp_clip_grad", None)
    if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0.0):
        raise ValueError(
            f"{spell('mtp_clip_grad')} {limit!r} is not a norm to clip to: give a positive number, 0 to clip no MTP "
            f"gradient, or leave it out to use clip_grad"
        )
    named_groups(settings)
    _check_coefficient(settings)


def _check_coefficient(settings: Any) -> None:
    least = getattr(settings, "min_clip_coefficient", None)
    if least is None:
        return
    if not isinstance(least, (int, float)) or not 0.0 < least < 1.0:
        raise ValueError(
            f"{spell('min_clip_coefficient')} {least!r} is not a factor to scale gradients down by: give a number "
            f"between 0 and 1, or leave it out to clip by any factor"
        )
    limits = [getattr(settings, name, None) or 0.0 for name in ("clip_grad", "mtp_clip_grad")]
    if not max(*limits, *(group.limit for group in named_groups(settings))) > 0.0:
        raise ValueError(
            f"{spell('min_clip_coefficient')} {least!r} has nothing to hold back, because no gradient is clipped: set "
            f"clip_grad, mtp_clip_grad or a limit of grad_norm_group, or leave it out"
        )


def _check_threshold(name: str, threshold: Any, settings: Any) -> None:
    if not isinstance(threshold, (int, float)) or not threshold > 0.0:
        raise ValueError(
            f"{spell(name)} {threshold!r} would skip every update or is not a number: give a positive number, or leave "
            f"it out to skip none"
        )
    if math.isfinite(threshold) and getattr(settings, "optimizer_cuda_graph", False):
        raise ValueError(
            f"{spell(name)} needs the gradient norm on the host each step, which {spell('optimizer_cuda_graph')} "
            f"cannot give: leave one of the two out"
        )


def check_separate_clip(settings: Any) -> None:
    """Raise ValueError if `settings`, those of model and optimizer, clip MTP heads that have no separate norm."""
    if getattr(settings, "mtp_detach_heads", False) or getattr(settings, "separate_mtp_grad_clip", False):
        return
    for name in SETTINGS_OF_MTP_GROUP:
        if getattr(settings, name, None) is not None:
            raise ValueError(
                f"{spell(name)} needs MTP heads with a separate norm: add {spell('mtp_detach_heads')}, or "
                f"{spell('separate_mtp_grad_clip')} to keep training the main model with the MTP loss"
            )


def check_places(of_optimizer: Any, of_model: Any) -> None:
    """Raise ValueError if a setting of the patches is an attribute of the configuration that does not have the field.

    Python sets any attribute of a dataclass, and nothing would read it there.
    """
    for config, other in ((of_optimizer, of_model), (of_model, of_optimizer)):
        own, fields = (getattr(type(one), "__dataclass_fields__", {}) for one in (config, other))
        strays = vars(config).keys() - own.keys() if own else set()
        for name in sorted(strays & fields.keys()):
            # Some of them are fields of newer releases, without the mark.
            if fields[name].metadata.get("added_in_place") or "mtp" in name or "grad_norm" in name:
                raise ValueError(
                    f"{spell(name)} is set on the {type(config).__name__}, where nothing reads it: it is a field of "
                    f"the {type(other).__name__}"
                )


@functools.cache  # Megatron also asks for the groups of the experts
def warn_of_missing_heads(name: str) -> None:
    text = f"{spell(name)} has no effect: the model has no MTP heads. Add {spell('mtp_num_layers')}"
    log_single_rank(logger, logging.WARNING, text)
