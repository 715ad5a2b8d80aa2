"""Numbers for Megatron's training log, TensorBoard and W&B."""

from __future__ import annotations

from typing import Any, NamedTuple


class Metric(NamedTuple):
    """`label` is for the log line; `tag` for TensorBoard and W&B, None if they have the number from elsewhere.

    `value` is a number or a one-element tensor, which stays on its device until it is printed.
    """

    label: str
    value: Any
    tag: str | None = None

    @property
    def text(self) -> str:
        value = f"{self.value:3d}" if isinstance(self.value, int) else f"{float(self.value):.3f}"
        return f" {self.label}: {value} |"
