"""What a rank can check alone: its weights are their main weights, all is finite, what trains moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from megatron_overrides.watch.bits import PIECE, sum_bits, view_bits
from megatron_overrides.watch.weights import Weight

# A step of Adam moves a weight by about its rate, and one of another optimizer by its rate times the clipped gradient:
# one that should move by this many units of its last place must.
ADAM, OTHERS = 2.0**6, 2.0**10


class Flaw(NamedTuple):
    """A tensor of this rank with which a relation does not hold.

    Attributes:
        relation: its name.
        name: of the tensor.
        detail: what is wrong, as the end of a sentence.
    """

    relation: str
    name: str
    detail: str


def check_casts(weights: Iterable[Weight]) -> Iterator[Flaw]:
    """Yield each weight that is not its main weight in the dtype of the model."""
    cast = [weight for weight in weights if _has_cast(weight)]
    flags = [_differs(weight.part(weight.param.data), weight.owned.detach().reshape(-1)) for weight in cast]
    for weight, differs in zip(cast, _read(flags), strict=True):
        if differs:
            yield Flaw("a weight is not its main weight", weight.name, "the two have other bits in the model's dtype")


def check_finite(weights: Iterable[Weight], with_gradients: bool) -> Iterator[Flaw]:
    """Yield each weight, main weight, moment and gradient that has an inf or NaN."""
    tensors = {}
    for weight in weights:
        tensors[f"weight {weight.name}"] = weight.param.data
        if weight.owned is not None:
            tensors[f"main weight {weight.name}"] = weight.owned
            tensors |= {f"{name} {weight.name}": moment for name, moment in weight.moments().items()}
        if with_gradients and (gradient := weight.gradient()) is not None:
            tensors[f"gradient {weight.name}"] = gradient
    named = {name: one for name, one in tensors.items() if one.is_floating_point() and type(one.data) is torch.Tensor}
    for name, is_bad in zip(named, _read([_has_nonfinite(one) for one in named.values()]), strict=True):
        if is_bad:
            yield Flaw("not finite", name, "it has an inf or NaN")


class Movement:
    """The sums of bits of weights before an update.

    Args:
        weights: of this rank.
        frozen: the sums of the weights that do not train, in the first check; it is filled there.
    """

    def __init__(self, weights: list[Weight], frozen: dict[str, torch.Tensor]) -> None:
        self._frozen = frozen
        self._still = [weight for weight in weights if not weight.param.requires_grad]
        for weight in self._still:
            frozen.setdefault(weight.name, sum_bits(weight.param.data))
        self._owned = [weight for weight in weights if weight.owned is not None and weight.param.requires_grad]
        self._sums = [sum_bits(weight.owned) for weight in self._owned]

    def check(self) -> Iterator[Flaw]:
        """Yield each weight that an update should have moved and has not, and each frozen one that has moved."""
        same = _read([sum_bits(one.owned) == before for one, before in zip(self._owned, self._sums, strict=True)])
        for weight, is_same in zip(self._owned, same, strict=True):
            if is_same and _should_move(weight):
                yield Flaw("a weight does not train", weight.name, "it has a gradient, and the update has not moved it")
        moved = _read([sum_bits(one.param.data) != self._frozen[one.name] for one in self._still])
        for weight, has_moved in zip(self._still, moved, strict=True):
            if has_moved:
                yield Flaw(
                    "a frozen weight has moved", weight.name, "it does not train, and has other bits than at first"
                )


def _has_cast(weight: Weight) -> bool:
    return (
        weight.owned is not None
        and weight.owned.dtype != weight.param.dtype
        and type(weight.param.data) is torch.Tensor  # a quantized one cannot be compared
    )


def _differs(part: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(1, dtype=torch.bool, device=part.device)
    for start in range(0, part.numel(), PIECE):
        piece = part[start : start + PIECE]
        flags |= (view_bits(piece) != view_bits(main[start : start + PIECE].to(piece.dtype))).any()
    return flags


def _has_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    flags = torch.zeros(1, dtype=torch.bool, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        flags |= ~flat[start : start + PIECE].isfinite().all()
    return flags


def _should_move(weight: Weight) -> bool:
    gradient = weight.gradient()
    if gradient is None or not weight.group or not weight.group["lr"] or not bool(gradient.any()):
        return False
    least = weight.owned.detach().abs().min() * torch.finfo(weight.owned.dtype).eps
    if "exp_avg" in weight.moments():
        return bool(weight.group["lr"] > ADAM * least)
    return bool(weight.group["lr"] * gradient.abs().max() > OTHERS * least)


def _read(flags: list[torch.Tensor]) -> list[bool]:
    """Flags that are on the device, in one read on the host."""
    return torch.cat(flags).tolist() if flags else []
