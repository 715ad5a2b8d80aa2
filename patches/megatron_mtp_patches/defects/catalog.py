"""All known defects, the most severe first."""

from __future__ import annotations

from importlib import import_module

from .declare import Defect

TOPICS: tuple[str, ...] = (
    "data",
    "fsdp",
    "fsdp_buffers",
    "log",
    "moe",
    "moe_losses",
    "mtp",
    "trainer",
)


def known_defects() -> tuple[Defect, ...]:
    """The defects of every module in `known`."""
    defects = (one for topic in TOPICS for one in import_module(f"{__package__}.known.{topic}").DEFECTS)
    return tuple(sorted(defects, key=lambda defect: -defect.severity))
