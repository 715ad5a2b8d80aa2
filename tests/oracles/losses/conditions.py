"""Under which conditions the losses of the heads are compared with the reference."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from tests.oracles.losses.packs import Pack

RANKS = 2
DEPTHS = 3
DPACE_ALPHA = 0.3
# The settings of each loss.
LOSSES = {
    "cross_entropy": {},
    "dpace": {"mtp_position_weights": "dpace", "mtp_dpace_alpha": DPACE_ALPHA},
    **{loss_type: {"mtp_loss_type": loss_type} for loss_type in ("kl", "tv", "lk", "e2e_tv")},
}


class Layout(NamedTuple):
    """How the positions lie on the ranks.

    Attributes:
        batch: how many packs or sequences there are side by side.
        is_packed: the sequences of `pack` are packed; otherwise it has one sequence without padding.
        data: how many data-parallel ranks there are, with a batch each.
    """

    name: str
    pack: Pack
    batch: int = 2
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    is_packed: bool = False
    data: int = 1

    def __str__(self) -> str:
        return self.name


_WHOLE = Pack(((24, 24),))
# Short sequences, one without tokens, and one that is shorter than the heads reach.
_PADDED = Pack(((9, 12), (2, 4), (0, 4), (12, 12), (5, 8)), tail=4)
LAYOUTS = (
    Layout("1 rank", _WHOLE),
    Layout("TP2", _WHOLE, tensor=2),
    Layout("TP2 + SP", _WHOLE, tensor=2, sequence_parallel=True),
    Layout("CP2", _WHOLE, context=2),
    Layout("packed, padded", _PADDED, batch=1, is_packed=True),
    Layout("packed + CP2", _PADDED, batch=1, context=2, is_packed=True),
)


# Where ranks have parts of a batch, or a batch each.
_CP2, _PACKED_CP2 = LAYOUTS[3], LAYOUTS[5]
SHARING_LAYOUTS = {
    2: (_CP2, _PACKED_CP2),
    4: (Layout("DP2 x CP2", _WHOLE, context=2, data=2),),
}
# Which positions count: all; the first two thirds; those of one context-parallel rank; those of one batch; none.
MASKS = ("ones", "tail", "one rank", "one batch", "none")


class Condition(NamedTuple):
    """What is trained by which loss.

    Attributes:
        loss_type: one of LOSSES.
        is_tied: the output weight is the embedding, given with each call.
        dtype: of hidden states and weights, as torch names it.
        mask: which positions count, one of MASKS; "holes" leaves out some of them at random.
        is_per_token: with `calculate_per_token_loss`.
    """

    layout: Layout
    loss_type: str
    is_tied: bool
    is_detached: bool
    dtype: str = "float32"
    mask: str = "holes"
    is_per_token: bool = False

    def __str__(self) -> str:
        words = ["tied" if self.is_tied else "untied", "detached" if self.is_detached else "attached"]
        if self.mask != "holes":
            words += [f"mask: {self.mask}", "per token" if self.is_per_token else "mean"]
        return f"{self.layout}, {self.loss_type}, {', '.join(words)}, {self.dtype}"


def conditions(layout: Layout, dtype: str = "float32") -> list[Condition]:
    """Return all conditions of a layout."""
    return [Condition(layout, *rest, dtype) for rest in product(LOSSES, (True, False), (True, False))]


def sharing_conditions(layout: Layout) -> list[Condition]:
    """Return the conditions under which the tokens that count lie unevenly on ranks and batches.

    Detached and attached heads take turns.
    """
    return [
        Condition(layout, loss_type, False, (place + is_per_token) % 2 == 0, mask=mask, is_per_token=is_per_token)
        for loss_type, (place, mask), is_per_token in product(LOSSES, enumerate(MASKS), (True, False))
    ]
