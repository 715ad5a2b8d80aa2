"""Changes of a run that tell where a deviation comes from: it goes away with one, and stays with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .flags import Flag

Flags = tuple[Flag, ...]


class Control(NamedTuple):
    """A change of the flags of a cut and of its reference.

    Attributes:
        name: as it stands in "equal NAME".
        change: returns the changed flags; the same ones where there is nothing to change.
    """

    name: str
    change: Callable[[Flags], Flags]


def _with(name: str, needs: str = "") -> Callable[[Flags], Flags]:
    """Add a switch to runs that lack it, and have the flag `needs` if one is named."""

    def change(flags: Flags) -> Flags:
        names = {flag.name for flag in flags}
        return flags if name in names or (needs and needs not in names) else (*flags, Flag(name))

    return change


def _without(*beginnings: str) -> Callable[[Flags], Flags]:
    """Remove the flags whose names begin so."""
    return lambda flags: tuple(flag for flag in flags if not flag.name.startswith(beginnings))


CONTROLS = (
    Control("with untied embeddings", _with("--untie-embeddings-and-output-weights")),
    Control("without fused weight gradients", _with("--no-gradient-accumulation-fusion")),
    Control("with sequence parallelism", _with("--sequence-parallel", needs="--tensor-model-parallel-size")),
    Control("without sequence parallelism", _without("--sequence-parallel")),
    Control("without recomputation", _without("--recompute-")),
    Control("without overlapped communication", _without("--overlap-", "--moe-shared-expert-overlap", "--delay-wgrad")),
    Control("without the distributed optimizer", _without("--use-distributed-optimizer", "--overlap-")),
    Control("without MTP heads", _without("--mtp-")),
    Control("with a mean over all tokens", _with("--calculate-per-token-loss")),
)
