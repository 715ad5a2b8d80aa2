"""Report the MTP heads beside Megatron-Bridge's validation loss."""

from __future__ import annotations

from typing import Any

from megatron.bridge.utils.common_utils import print_rank_last

from megatron_overrides.call import Call
from megatron_overrides.frameworks.bridge import log_scalars
from megatron_overrides.report.validation_metrics import validate, validation_line


def report_heads(call: Call) -> Any:
    """Wraps evaluate_and_print_results(state, prefix, ..., write_to_tensorboard, ...): adds a line and scalars."""
    result, sets = validate(call)
    for measured in sets:
        print_rank_last(validation_line(call["prefix"], measured))
        if call["write_to_tensorboard"]:
            log_scalars(call["state"], {f"{name} validation": value for name, value in measured.items()})
    return result
