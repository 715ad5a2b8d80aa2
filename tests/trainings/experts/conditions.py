"""Under which conditions the norms of experts are measured."""

from __future__ import annotations

from typing import NamedTuple

RANKS = 4


class Layout(NamedTuple):
    """How a model is distributed over the ranks: sizes of its tensor, expert and expert-tensor parallel groups."""

    tensor: int
    expert: int
    expert_tensor: int

    def __str__(self) -> str:
        return f"TP{self.tensor} EP{self.expert} ETP{self.expert_tensor}"


LAYOUTS = (Layout(2, 2, 1), Layout(2, 2, 2), Layout(2, 1, 2), Layout(2, 4, 1))
WITH_REPLICAS = Layout(2, 1, 1)  # all ranks hold all experts
OPTIMIZERS = ("adam", "distributed optimizer", "muon", "dist_muon")


class Condition(NamedTuple):
    """Which optimizer trains a model of a layout.

    Attributes:
        has_bias: its linear layers have biases.
        optimizer: one of OPTIMIZERS.
        clips_mtp: the gradients of its MTP head have a separate norm.
    """

    layout: Layout
    has_bias: bool
    optimizer: str
    clips_mtp: bool

    def __str__(self) -> str:
        return ", ".join(
            (str(self.layout), *["bias"] * self.has_bias, self.optimizer, *["separate MTP norm"] * self.clips_mtp)
        )


def sample(layout: Layout) -> list[Condition]:
    """One condition of each optimizer; biases and separate norms take turns."""
    conditions_by_optimizer = [[one for one in conditions(layout) if one.optimizer == name] for name in OPTIMIZERS]
    return [some[(place + LAYOUTS.index(layout)) % len(some)] for place, some in enumerate(conditions_by_optimizer)]


def conditions(layout: Layout) -> list[Condition]:
    """All conditions of a layout. Megatron refuses biases of experts that are split (ETP2)."""
    biases = (False, True) if layout.expert_tensor == 1 else (False,)
    return [
        Condition(layout, has_bias, optimizer, clips_mtp)
        for has_bias in biases
        for optimizer in OPTIMIZERS
        for clips_mtp in (False, True)
    ]
