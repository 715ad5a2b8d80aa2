"""Numbers for Megatron's training log, TensorBoard and W&B: overrides put them here, training.training shows them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Metric(NamedTuple):
    """`label` is for the log line; `tag` for TensorBoard and W&B, None if they have the number from elsewhere.

    `value` is a number or a one-element tensor, which stays on its device until somebody looks.
    """

    label: str
    value: Any
    tag: str | None

    @property
    def text(self) -> str:
        value = f"{self.value:3d}" if isinstance(self.value, int) else f"{float(self.value):.3f}"
        return f" {self.label}: {value} |"


_shown: dict[str, Metric] = {}


def show(label: str, value: Any, tag: str | None = None) -> None:
    """Show `value` from now on, until it is shown with another value."""
    _shown[label] = Metric(label, value, tag)


def shown() -> list[Metric]:
    return list(_shown.values())
