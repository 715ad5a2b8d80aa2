"""A watch over the numbers of an optimizer's run: which steps it checks, and what it checks in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as upstream
from megatron.core.utils import log_single_rank

from megatron_overrides.mtp.frozen.trained_parts import UNTRAINED_HEADS
from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP
from megatron_overrides.norms.step_decision import skip_threshold
from megatron_overrides.norms.step_state import start_step, step_state_of
from megatron_overrides.run_arguments import arguments_of_run
from megatron_overrides.watch.batches import Batches
from megatron_overrides.watch.chunks import find_chunks
from megatron_overrides.watch.copies import Comparison, Copies
from megatron_overrides.watch.differences import describe_mismatches
from megatron_overrides.watch.findings import Finding, Findings, WatchError, gather
from megatron_overrides.watch.gaps import name_gaps
from megatron_overrides.watch.gradients import Gradients, select_norms
from megatron_overrides.watch.rank_checks import Flaw, Movement, check_casts, check_finite, check_norms
from megatron_overrides.watch.relations import DIFFERENT
from megatron_overrides.watch.tensors import Watched, find_tensors
from megatron_overrides.watch.weights import Weight, find_trained

logger = logging.getLogger(__name__)


class Watch:
    """Checks that hold in every run, around an update.

    Args:
        config, model_chunks: what get_megatron_optimizer has got: its configuration, and the model of this rank.
        optimizer: what it has returned.
    """

    def __init__(self, config: Any, model_chunks: list[Any], optimizer: Any) -> None:
        self._config = config
        self._chunks = find_chunks(model_chunks)
        self._optimizer = optimizer
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._batches = Batches(self._chunks)
        self._batches.start()  # the first step is due
        self._copies: Copies | None = None
        self._gradients: Gradients | None = None
        self._has_moments = False
        self._has_every_place = True
        self._frozen: dict[str, torch.Tensor] = {}
        self._findings = Findings(config.watch_action, step_state_of(optimizer), self._find_settings(model_chunks))
        self._steps = 0

    def step(self, update: Callable[[], Any]) -> Any:
        """Update, and check that step if it is due. A collective of all ranks then.

        Args:
            update: the step of the optimizer; it returns whether it was a success, and what else Megatron's returns.

        Raises:
            WatchError: a relation does not hold, and the action is "raise"; or the watch does not notice a bit that it
                has flipped itself.
        """
        start_step(self._optimizer)
        self._steps += 1
        is_due = (self._steps - 1) % self._config.watch_invariants == 0
        result = self._check(update) if is_due else update()
        if self._steps % self._config.watch_invariants == 0:
            self._batches.start()
        return result

    def _check(self, update: Callable[[], Any]) -> Any:
        self._findings.report(gather(self._batches.compare()), self._steps)  # copies may differ because of them
        trained = find_trained(self._optimizer)
        weights_by_chunk = [chunk.find_weights(trained) for chunk in self._chunks]
        weights = list(chain.from_iterable(weights_by_chunk))
        copies, gradients = self._find_tensors(weights_by_chunk)
        comparison = copies.compare()
        # QK clipping scales a weight and its main weight each by itself, so they differ by a rounding until the update.
        model_config = self._chunks[0].model.config
        casts = [] if model_config.qk_clip else check_casts(weights)
        losses = self._batches.check_losses()
        # A step with a NaN or inf may be meant to be skipped: by the loss scaler, or for its norm.
        with_gradients = not self._config.fp16 and not math.isfinite(skip_threshold(self._config))
        flaws = [*casts, *check_finite(weights, with_gradients), *(losses if with_gradients else ())]
        norms = gradients.measure()
        missing = gradients.find_missing(with_heads=_do_heads_train(model_config))
        self._findings.report([*self._describe(copies, comparison), *gather(flaws), *missing], self._steps)
        are_all_frozen = bool(getattr(arguments_of_run(), "freeze_all_layers", False))
        movement = Movement(weights, self._frozen, are_all_frozen)
        result = update()
        skips_heads = step_state_of(self._optimizer).decision.skips_mtp
        flaws = [*movement.check(skips_heads), *self._check_norms(result[1], norms)] if result[0] else []
        self._findings.report(gather(flaws), self._steps)
        return result

    def _describe(self, copies: Copies, comparison: Comparison) -> list[Finding]:
        """The finding of a comparison, which is measured only if it will be said."""
        if not comparison.numbers:
            return []
        if self._findings.has_said(DIFFERENT):
            return [Finding(DIFFERENT, [], len(comparison.numbers), "")]
        return [describe_mismatches(copies, comparison)]

    def _find_settings(self, model_chunks: list[Any]) -> list[object]:
        """The arguments of Megatron's trainer, or what another one has given to the model and the optimizer."""
        arguments = arguments_of_run()
        if arguments is not None:
            return [arguments]
        wrapped = [chunk.ddp_config for chunk in model_chunks[:1] if hasattr(chunk, "ddp_config")]
        ranks = SimpleNamespace(world_size=dist.get_world_size())
        return [self._config, self._chunks[0].model.config, *wrapped, ranks]

    def _check_norms(self, main: Any, measured: dict[str | None, float]) -> Iterator[Flaw]:
        """Compare the norms that the update reports, but not of a scaled loss, nor where a gradient has no place."""
        if main is None or not self._has_every_place or self._config.fp16 or not self._config.clip_grad > 0.0:
            return
        reported = {None: main, **(getattr(self._optimizer, "grad_norms_by_group", None) or {})}
        # A release that knows groups has to give detached heads one.
        is_detached = getattr(self._chunks[0].model.config, "mtp_detach_heads", False) and hasattr(
            upstream, "SEPARATE_GRAD_NORM_GROUPS"
        )
        yield from check_norms(select_norms(measured, reported, MTP_GRAD_NORM_GROUP in reported or is_detached))

    def _find_tensors(self, weights: list[list[Weight]]) -> tuple[Copies, Gradients]:
        """The tensors that have copies, which are looked for again when there are moments, and the gradients."""
        if self._copies is None:
            check_itself()
        if self._copies is None or self._has_got_moments(weights):
            tensors = list(chain.from_iterable(map(find_tensors, (chunk.place() for chunk in self._chunks), weights)))
            self._copies = Copies(tensors, self._device)
            with_moments = ", with the moments" if self._has_moments else ""
            text = f"watch: compares {self._copies.size} tensors of which several ranks have copies{with_moments}"
            log_single_rank(logger, logging.WARNING, text)
        if self._gradients is None:
            self._note_places(tensors, weights)
            alone = sum(bool(one.weight) for one in self._copies.alone)
            gaps = [*name_gaps([*chain.from_iterable(weights)], self._config, self._chunks[0].model.config, alone)]
            if gaps:
                log_single_rank(logger, logging.WARNING, f"watch: does not check {'; '.join(gaps)}")
            self._gradients = Gradients((one for one in self._copies.first_held if one.weight), self._device)
        return self._copies, self._gradients

    def _has_got_moments(self, weights: list[list[Weight]]) -> bool:
        """True in the first check in which some rank has moments; it asks the others until then."""
        if self._has_moments:
            return False
        trained = (weight.trained for weight in chain.from_iterable(weights))
        count = torch.tensor([sum(bool(one and one.moments()) for one in trained)], device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        self._has_moments = bool(int(count))
        return self._has_moments

    def _note_places(self, tensors: list[Watched], weights: list[list[Weight]]) -> None:
        """Note whether each trained weight of all ranks has a place; without one it is no copy, nor in the norm."""
        trained = sum(weight.trained is not None for weight in chain.from_iterable(weights))
        placed = sum(bool(tensor.weight) for tensor in tensors)
        unplaced = torch.tensor([trained - placed], device="cuda")
        dist.all_reduce(unplaced)
        self._has_every_place = not int(unplaced)
        if not self._has_every_place:
            text = (
                f"watch: sharded_state_dict has no place for {int(unplaced)} weights, so they and the norm are left out"
            )
            log_single_rank(logger, logging.WARNING, text)


def _do_heads_train(config: Any) -> bool:
    return bool(getattr(config, "mtp_loss_scaling_factor", True)) and not getattr(config, UNTRAINED_HEADS, False)


def check_itself() -> None:
    """Flip a bit of a scratch copy on rank 0, which has to be noticed on all ranks.

    Raises:
        WatchError: it is not.
    """
    if dist.get_world_size() < 2:
        return
    scratch = torch.arange(4.0, device="cuda")
    copies = Copies([Watched("scratch", lambda: scratch)], scratch.device)
    is_silent = not copies.compare().numbers
    if dist.get_rank() == 0:
        scratch.view(torch.int32)[2] ^= 1
    if not is_silent or not copies.compare().numbers:
        raise WatchError("watch: a bit that it has flipped itself was not noticed: report this to megatron_mtp_patches")
