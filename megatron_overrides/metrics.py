"""Numbers for Megatron's training log, TensorBoard and W&B: overrides put them here, training.training shows them."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """`label` is for the log line, `tag` for TensorBoard and W&B."""

    label: str
    tag: str
    value: float | int

    @property
    def text(self) -> str:
        value = f"{self.value:3d}" if isinstance(self.value, int) else f"{self.value:.3f}"
        return f" {self.label}: {value} |"


_shown: dict[str, Metric] = {}


def show(label: str, tag: str, value: float | int) -> None:
    """Show `value` from now on, until it is shown with another value."""
    _shown[tag] = Metric(label, tag, value)


def shown() -> list[Metric]:
    return list(_shown.values())
