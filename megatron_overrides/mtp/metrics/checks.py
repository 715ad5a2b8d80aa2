"""Refuse intervals of metrics that a CUDA graph of the whole iteration cannot keep."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.checks import captures_whole_iteration, spell

# The smallest interval that decides in each step whether to measure. Every step can be captured where it measures the
# same; label agreement does with interval 1.
_DECIDES_FROM = (("mtp_acceptance_interval", 2), ("mtp_acceptance_length_interval", 1))


def check_cuda_graphs(settings: Any) -> None:
    """Raise ValueError if a graph would repeat the decision of the step in which it was captured."""
    for name, first in _DECIDES_FROM:
        if getattr(settings, name, 0) >= first and captures_whole_iteration(settings):
            possible = "0" if first == 1 else "1 or 0"
            raise ValueError(
                f"{spell(name)} decides in each step whether to measure, but a CUDA graph of the whole iteration "
                f"repeats the step that it was captured in: set the interval to {possible}"
            )
