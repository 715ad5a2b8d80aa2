"""What one run wrote for TensorBoard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BITS = 1 / math.log(2)  # from nats to bits


@dataclass
class Curves:
    """What one run wrote for TensorBoard, by iteration. Losses are in bits per byte."""

    loss: dict[int, float]
    mtp_loss: dict[int, float]
    grad_norm: dict[int, float]
    mtp_grad_norm: dict[int, float]
    acceptance: dict[int, dict[int, float]]  # of each head, in percent
    validation_loss: float | None
    updates_skipped: int


def read_curves(folder: Path) -> Curves:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def scalar(tag: str, unit: float = 1.0) -> dict[int, float]:
        if tag not in events.Tags()["scalars"]:
            return {}
        return {event.step: event.value * unit for event in events.Scalars(tag)}

    return Curves(
        loss=scalar("lm loss", BITS),
        mtp_loss=scalar("mtp_1 loss", BITS),
        grad_norm=scalar("grad-norm"),
        mtp_grad_norm=scalar("mtp-grad-norm"),
        acceptance={head: scalar(f"mtp_{head}_acceptance_rate") for head in (1, 2)},
        validation_loss=next(iter(scalar("lm loss validation", BITS).values()), None),
        updates_skipped=int(max(scalar("updates-skipped-for-grad-norm").values(), default=0)),
    )
