"""The wrapper that begins a new interval of the log after the first line of a process."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.run_arguments import arguments_of_run


def start_new_log_interval(call: Call) -> Any:
    """Wraps training_log(..., iteration, ..., is_first_iteration) (NVIDIA/Megatron-LM#7092).

    After the first line of a process Megatron keeps its sums, for the line at the end of the interval. Where that is
    the first line itself, they must not be in the next one.
    """
    if call.get("is_first_iteration") and call["iteration"] % arguments_of_run().log_interval == 0:
        call["is_first_iteration"] = False
    return call.proceed()
