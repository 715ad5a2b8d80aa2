"""What a rank can check alone: its weights are their main weights, all is finite, norms agree, what trains moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from megatron_overrides.model_places import is_quantized
from megatron_overrides.watch.bits import PIECE, sum_bits, view_bits
from megatron_overrides.watch.weights import HEADS, Trained, Weight

# An update of this many units in the last place of an element has to move it. That of another optimizer than Adam is
# taken to be the rate times the gradient, which clipping may make smaller.
ADAM, OTHERS = 2.0**6, 2.0**10
NORM = 1e-5  # relative; sums in fp32 and in another order differ by about 1e-6


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
    """Yield each weight that is not its main weight in the dtype of the model. A quantized one cannot be compared."""
    flags = {
        weight.name: _differs(weight.trained_values(), trained.values())
        for weight, trained in _pair_trained(weights)
        if not is_quantized(weight.param) and weight.has_main_weight()
    }
    for name in _find_raised(flags):
        yield Flaw("a weight is not its main weight", name, "the two differ in the model's dtype")


def check_finite(weights: Iterable[Weight], with_gradients: bool) -> Iterator[Flaw]:
    """Yield each weight, main weight and moment that has an inf or NaN, then each such gradient."""
    tensors: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    for weight in weights:
        tensors[f"weight {weight.name}"] = weight.read()
        if with_gradients and (gradient := weight.read_gradient()) is not None:
            gradients[f"gradient {weight.name}"] = gradient
        if weight.trained is not None:
            tensors[f"main weight {weight.name}"] = weight.trained.values()
            tensors |= {f"{name} {weight.name}": moment for name, moment in weight.trained.moments().items()}
    flags = {
        name: _has_nonfinite(one)
        for name, one in (tensors | gradients).items()
        if type(one) is torch.Tensor and one.is_floating_point()
    }
    for name in _find_raised(flags):
        yield Flaw("not finite", name, "it has an inf or NaN")


def check_norms(norms: Iterable[tuple[str, float, float]]) -> Iterator[Flaw]:
    """Yield each gradient norm that an update reports and that is not that of its gradients (see select_norms)."""
    for name, reported, measured in norms:
        if abs(reported - measured) > NORM * measured:
            text = f"the update reports {reported:.7g}, and its gradients, each counted once, have {measured:.7g}"
            yield Flaw("the reported gradient norm is wrong", name, text)


class Movement:
    """The sums of bits of weights before an update, and of those that do not train.

    Args:
        weights: of this rank.
        frozen: the sums of the weights that do not train, from the first check since they do not; it is kept up here.
        are_all_frozen: a flag of the run says so, whatever the parameters say.
    """

    def __init__(self, weights: list[Weight], frozen: dict[str, torch.Tensor], are_all_frozen: bool) -> None:
        self._frozen = frozen
        still = (weight for weight in weights if are_all_frozen or not weight.param.requires_grad)
        self._still = [weight for weight in still if not is_quantized(weight.param)]
        for name in frozen.keys() - {weight.name for weight in self._still}:
            del frozen[name]  # it trains now
        for weight in self._still:
            frozen.setdefault(weight.name, sum_bits(weight.read()))
        moving = () if are_all_frozen else (pair for pair in _pair_trained(weights) if pair[0].param.requires_grad)
        self._before = {weight.name: (weight, trained, sum_bits(trained.values())) for weight, trained in moving}

    def check(self, skips_heads: bool) -> Iterator[Flaw]:
        """Yield each weight that an update should have moved and has not, and each frozen one that has moved.

        The update may have skipped the MTP heads.
        """
        same = {name: sum_bits(trained.values()) == before for name, (_, trained, before) in self._before.items()}
        for name in _find_raised(same):
            weight, trained, _ = self._before[name]
            if not (skips_heads and HEADS in weight.name) and _should_move(weight, trained):
                yield Flaw("a weight does not train", name, "it has a gradient, and the update has not moved it")
        moved = {one.name: sum_bits(one.read()) != self._frozen[one.name] for one in self._still}
        for name in _find_raised(moved):
            yield Flaw(
                "a frozen weight has moved",
                name,
                "its bits are not those that it had when it was first checked as frozen",
            )


def _pair_trained(weights: Iterable[Weight]) -> Iterator[tuple[Weight, Trained]]:
    return ((weight, weight.trained) for weight in weights if weight.trained is not None)


def _differs(part: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(1, dtype=torch.bool, device=part.device)
    for start in range(0, part.numel(), PIECE):
        piece = part[start : start + PIECE]
        flags |= (view_bits(piece) != view_bits(main[start : start + PIECE].to(piece))).any()
    return flags


def _has_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    flags = torch.zeros(1, dtype=torch.bool, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        flags |= ~flat[start : start + PIECE].isfinite().all()
    return flags


def _should_move(weight: Weight, trained: Trained) -> bool:
    """True if the update is large against the last place of some element, as far as Adam's moments or the rate tell."""
    rate, gradient, moments = trained.group["lr"], weight.read_gradient(), trained.moments()
    if gradient is None or not rate or not gradient.any():
        return False
    values = trained.values()
    first, second = moments.get("exp_avg"), moments.get("exp_avg_sq")
    if first is not None and first.dtype == torch.float32 and not first.any():  # the update has not read the gradient
        return True
    parts = [slice(start, start + PIECE) for start in range(0, values.numel(), PIECE)]
    units = (values[part].abs() * torch.finfo(values.dtype).eps for part in parts)
    if first is None or second is None:
        largest = float(rate * gradient.abs().max())
        return any(largest > OTHERS * float(unit.min()) for unit in units)
    least = trained.group.get("eps", 1e-8)
    steps = (rate * first[part].abs() / (second[part].sqrt() + least) for part in parts)
    return any(bool((step > ADAM * unit).any()) for step, unit in zip(steps, units, strict=True))


def _find_raised(flags: dict[str, torch.Tensor]) -> list[str]:
    """The names of the flags that are true. They are read at once; those of an offloaded optimizer are on the CPU."""
    device = next((flag.device for flag in flags.values()), None)
    raised = torch.cat([flag.to(device) for flag in flags.values()]).tolist() if flags else []
    return [name for name, is_true in zip(flags, raised, strict=True) if is_true]
