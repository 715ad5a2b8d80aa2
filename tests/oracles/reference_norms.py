"""A reference for a step: plain torch on whole vectors, without ranks and without optimizers."""

import math
from typing import Any, NamedTuple

import pytest
import torch


class Gradient(NamedTuple):
    """The whole gradient of one parameter. `counted` is False for a copy of a parameter that is counted elsewhere."""

    values: torch.Tensor | None
    heads: bool = False
    exempt: bool = False
    counted: bool = True


class Outcome(NamedTuple):
    """`used` has the update of each parameter, None if it does not change; `zeros` counts the zeros of updates."""

    updated: bool
    heads_dropped: bool
    norm: float
    norms_of_groups: dict[str, float]
    used: list[torch.Tensor | None]
    zeros: int


def expected_step(gradients: list[Gradient], settings: dict[str, Any], nan_spreads: bool) -> Outcome:
    """Return the outcome of a step.

    `nan_spreads`: a NaN norm makes every gradient that it clips NaN, as in releases that keep the norm on the device.
    """
    main_model, heads = (_norms([each for each in gradients if each.heads is wanted]) for wanted in (False, True))
    there_are_heads = any(each.heads for each in gradients)
    threshold = settings["grad_norm_skip_threshold"]
    mtp_threshold = settings["mtp_grad_norm_skip_threshold"]
    mtp_threshold = threshold if mtp_threshold is None else mtp_threshold
    skipped = _too_large(*main_model, threshold)
    dropped = not skipped and there_are_heads and _too_large(*heads, mtp_threshold)

    limit = settings["clip_grad"]
    mtp_limit = settings["mtp_clip_grad"]
    floor = settings["min_clip_coefficient"]
    factors = {
        False: _factor(main_model[1], limit, floor, nan_spreads),
        True: _factor(heads[1], limit if mtp_limit is None else mtp_limit, floor, nan_spreads),
    }
    left = []
    for values, of_heads, exempt, _ in gradients:
        if values is None or (dropped and of_heads):
            left.append(None)
        else:
            left.append(values if skipped or exempt else values * factors[of_heads])
    zeros = sum(int((v == 0).sum()) for v, each in zip(left, gradients, strict=True) if v is not None and each.counted)
    used = [None] * len(left) if skipped else left
    return Outcome(not skipped, dropped, main_model[0], {"mtp": heads[0]} if there_are_heads else {}, used, zeros)


def _norms(gradients: list[Gradient]) -> tuple[float, float]:
    """Return the norm of all gradients, and the norm of those that may be clipped."""
    return _norm(gradients), _norm([each for each in gradients if not each.exempt])


def _norm(gradients: list[Gradient]) -> float:
    values = [each.values.flatten() for each in gradients if each.counted and each.values is not None]
    square = float(torch.cat([torch.zeros(0), *values]).double().square().sum())
    return math.inf if square > torch.finfo(torch.float32).max else math.sqrt(square)  # norms are float32


def _too_large(whole: float, clippable: float, threshold: float) -> bool:
    if threshold == math.inf:
        return False
    return math.isnan(whole) or math.isinf(whole) or clippable > threshold


def _factor(norm: float, limit: float, floor: float | None, nan_spreads: bool) -> float:
    if limit == 0:
        return 1.0
    if math.isnan(norm):
        return math.nan if nan_spreads else 1.0
    return min(1.0, max(limit / (norm + 1e-6), floor or 0.0))


def about(value: Any) -> Any:
    """Compare with the precision of float32, which norms have."""
    return pytest.approx(value, rel=1e-5, nan_ok=True)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0, equal_nan=True)
