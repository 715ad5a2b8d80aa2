"""A watch over the numbers of an optimizer's run: which steps it checks, and what it checks in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_overrides.watch.copies import Copies, Mismatch
from megatron_overrides.watch.findings import Finding, Findings, WatchError, describe_ranks, gather
from megatron_overrides.watch.rank_checks import Flaw, Movement, check_casts, check_finite, check_norm
from megatron_overrides.watch.tensors import GRADIENT, Watched, find_tensors
from megatron_overrides.watch.weights import Weight, find_weights, unwrap

logger = logging.getLogger(__name__)
# Copies of weights are named before what differs because of them.
_ORDER = ("weight ", "buffer ", "main weight ", GRADIENT, "")


class Watch:
    """Checks that hold in every run, around an update.

    Args:
        config, model_chunks: what get_megatron_optimizer has got: its configuration, and the model of this rank.
        optimizer: what it has returned.
    """

    def __init__(self, config: Any, model_chunks: list[Any], optimizer: Any) -> None:
        self._config = config
        self._models = [unwrap(chunk) for chunk in model_chunks]
        self._optimizer = optimizer
        self._copies: Copies | None = None
        self._has_moments = False
        self._has_every_place = True
        self._frozen: dict[str, torch.Tensor] = {}
        self._findings = Findings(config.watch_action)
        self._steps = 0

    def step(self, update: Callable[[], Any]) -> Any:
        """Update, and check that step if it is due. A collective of all ranks then.

        Args:
            update: the step of the optimizer; it returns whether it was a success, and what else Megatron's returns.

        Raises:
            WatchError: a relation does not hold, and the action is "raise"; or the watch does not notice a bit that it
                has flipped itself.
        """
        self._steps += 1
        if (self._steps - 1) % self._config.watch_invariants:
            return update()
        weights_by_chunk = find_weights(self._models, self._optimizer)
        copies = self._find_copies(weights_by_chunk)
        mismatches = copies.compare()
        all_weights = list(chain.from_iterable(weights_by_chunk))
        # QK clipping scales a weight and its main weight each by itself, so they differ by a rounding until the update.
        casts = [] if self._models[0].config.qk_clip else check_casts(all_weights)
        flaws = [*casts, *check_finite(all_weights, not self._config.fp16)]
        differing = [_describe(mismatches)] if mismatches else []
        self._findings.report([*differing, *gather(flaws)], self._steps)
        movement, norm = Movement(all_weights, self._frozen), copies.norm(GRADIENT)
        result = update()
        flaws = [*movement.check(), *self._check_norm(result[1], norm)] if result[0] else []
        self._findings.report(gather(flaws), self._steps)
        return result

    def _check_norm(self, reported: Any, expected: float) -> Iterator[Flaw]:
        """Compare the norm that the update reports: not of a scaled loss, nor where groups have norms of their own."""
        has_groups = bool(getattr(self._optimizer, "grad_norms_by_group", None))
        if self._has_every_place and not self._config.fp16 and self._config.clip_grad > 0.0 and not has_groups:
            yield from check_norm(reported, expected)

    def _find_copies(self, weights: list[list[Weight]]) -> Copies:
        """The tensors that have copies, as the first check finds them, and the second one, when there are moments."""
        if self._copies is None or not self._has_moments:
            self._has_moments = self._copies is not None
            if self._copies is None:
                check_itself()
            tensors = list(chain.from_iterable(map(find_tensors, self._models, weights)))
            self._copies = Copies(tensors, torch.device("cuda", torch.cuda.current_device()))
            self._note_places(tensors, weights)
            text = f"watch: compares {self._copies.size} tensors of which several ranks have copies"
            log_single_rank(logger, logging.INFO, text)
        return self._copies

    def _note_places(self, tensors: list[Watched], weights: list[list[Weight]]) -> None:
        """Note whether each trained weight of all ranks has a place; without one it is no copy, nor in the norm."""
        trained = sum(weight.trained is not None for weight in chain.from_iterable(weights))
        placed = sum(tensor.name.startswith(GRADIENT) for tensor in tensors)
        unplaced = torch.tensor([trained - placed], device="cuda")
        dist.all_reduce(unplaced)
        self._has_every_place = not int(unplaced)
        if not self._has_every_place:
            text = (
                f"watch: sharded_state_dict has no place for {int(unplaced)} weights, so they and the norm are left out"
            )
            log_single_rank(logger, logging.WARNING, text)


def check_itself() -> None:
    """Flip a bit of a scratch copy on rank 0, which has to be noticed on all ranks.

    Raises:
        WatchError: it is not.
    """
    if dist.get_world_size() < 2:
        return
    scratch = torch.arange(4.0, device="cuda")
    copies = Copies([Watched("scratch", lambda: scratch)], scratch.device)
    is_silent = not copies.compare()
    if dist.get_rank() == 0:
        scratch.view(torch.int32)[2] ^= 1
    if not is_silent or not copies.compare():
        raise WatchError("watch: a bit that it has flipped itself was not noticed: report this to megatron_mtp_patches")


def _describe(mismatches: list[Mismatch]) -> Finding:
    mismatches = sorted(mismatches, key=_place_in_order)
    first = mismatches[0]
    ranks_of: dict[int, list[int]] = {}
    for rank, total in first.sums.items():
        ranks_of.setdefault(total, []).append(rank)
    groups = sorted(ranks_of.values(), key=len, reverse=True)
    said = " and ".join(map(describe_ranks, groups[:3]))
    others = f" and {len(groups) - 3} more groups" if len(groups) > 3 else ""
    return Finding("copies differ", [one.name for one in mismatches], f"of the first, {said}{others} have other bits")


def _place_in_order(mismatch: Mismatch) -> int:
    return next(place for place, kind in enumerate(_ORDER) if mismatch.name.startswith(kind))
