"""The learning rates of single parameter groups after a resume: those of the run, or those of the checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.resume.param_groups import rates_of, spell_rates

logger = logging.getLogger(__name__)


def remember_learning_rates(call: Call) -> None:
    """Wraps OptimizerParamScheduler.__init__: the run's learning rates, before a checkpoint brings others."""
    call.proceed()
    call.instance._mtp_patches_rates_of_run = [rates_of(group) for group in call["optimizer"].param_groups]


def override_learning_rates(call: Call) -> None:
    """Wraps OptimizerParamScheduler.load_state_dict, which ends with a step of the schedule."""
    scheduler = call.instance
    if not _restore_learning_rates(scheduler):
        _warn_of_other_rates(scheduler)
    call.proceed()


def override_learning_rates_of_groups(call: Call) -> Any:
    """Wraps load_checkpoint, which on main overrides the learning rates of all groups by those of one (#7173)."""
    outcome = call.proceed()
    scheduler = call["opt_param_scheduler"]
    if scheduler is not None and _restore_learning_rates(scheduler):
        scheduler.step(increment=0)
    return outcome


def _restore_learning_rates(scheduler: Any) -> bool:
    """True if --override-opt-param-scheduler asks for the rates of the run, which are put into the groups then."""
    rates = getattr(scheduler, "_mtp_patches_rates_of_run", None)
    if rates is None or not scheduler.override_opt_param_scheduler:  # another class than Megatron's has neither
        return False
    for group, own in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group.update(own)
    return True


def _warn_of_other_rates(scheduler: Any) -> None:
    """Megatron compares --lr and --min-lr with the checkpoint's, and not what single groups have in their place."""
    rates = getattr(scheduler, "_mtp_patches_rates_of_run", None)
    if rates is None or scheduler.use_checkpoint_opt_param_scheduler:
        return
    saved = [rates_of(group) for group in scheduler.optimizer.param_groups]
    differing = {(spell_rates(own), spell_rates(kept)) for own, kept in zip(rates, saved, strict=True) if own != kept}
    for own, kept in sorted(differing):
        text = f"A parameter group goes on with what the checkpoint has ({kept}), not with what this run sets ({own})"
        log_single_rank(logger, logging.WARNING, f"{text}: add --override-opt-param-scheduler to take the run's")
