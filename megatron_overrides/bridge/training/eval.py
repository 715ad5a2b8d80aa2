"""Report the MTP heads beside Megatron-Bridge's validation loss."""

from __future__ import annotations

from typing import Any

from megatron.bridge.utils.common_utils import print_rank_last

from megatron_overrides.bridge.training.utils.train_utils import log_scalars
from megatron_overrides.support.validation_metrics import validate, validation_line


def report_heads(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps evaluate_and_print_results(state, prefix, ..., write_to_tensorboard, ...): adds a line and scalars."""
    given, result, sets = validate(wrapped, args, kwargs)
    for measured in sets:
        print_rank_last(validation_line(given["prefix"], measured))
        if given["write_to_tensorboard"]:
            log_scalars(given["state"], {f"{name} validation": value for name, value in measured.items()})
    return result
