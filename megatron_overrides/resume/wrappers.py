"""The wrappers around Megatron's functions that save and load a run."""

from __future__ import annotations

import copy
import logging
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.resume.bucket_padding import without_padding
from megatron_overrides.resume.param_groups import (
    Group,
    are_divided_otherwise,
    pair_groups,
    settings_of,
    with_steps,
)
from megatron_overrides.resume.tensor_metadata import with_properties_of_empty

logger = logging.getLogger(__name__)


def pair_saved_groups(call: Call) -> list[dict[str, Any]]:
    """Wraps MegatronOptimizer._filter_and_reorder_param_groups(current_groups, state_dict_groups).

    With the format torch_dist the saved groups are those of the first rank. A group that is empty there, as that of MTP
    heads is on the first pipeline stage, has no step in FusedAdam (NVIDIA/TransformerEngine#3318): it gets that of the
    others.
    """
    current, saved = call["current_groups"], call["state_dict_groups"]
    _refuse_other_division(current, saved)
    pairs = pair_groups(current, saved)
    if pairs is None:
        return call.proceed()
    if len(current) < len(saved):  # their parameters are in the order of the saved groups
        raise _other_division(current, saved)
    return [{**group, "params": place["params"]} for group, place in zip(with_steps(pairs), saved, strict=True)]


def load_groups_in_pairs(call: Call) -> None:
    """Wraps DistributedOptimizer.load_state_dict.

    Megatron finds each group, because it is given the counterparts with the settings by which it tells groups; those
    that the checkpoint has follow. Of groups that it cannot tell, it may give one a setting that only another has.
    """
    state_dict = call["state_dict"]
    optimizer = call.instance.optimizer
    saved = state_dict.get("optimizer", {}).get("param_groups")
    if saved:
        _refuse_other_division(optimizer.param_groups, saved)
    pairs = saved and pair_groups(optimizer.param_groups, saved)
    if not pairs:
        call.proceed()
        return
    counterparts = [
        {**saved_group, **settings_of(group)} for saved_group, group in zip(pairs, optimizer.param_groups, strict=True)
    ]
    call["state_dict"] = {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": counterparts}}
    names_before = [set(group) for group in optimizer.param_groups]
    call.proceed()
    for group, saved_group, names in zip(optimizer.param_groups, pairs, names_before, strict=True):
        for foreign in set(group) - names - set(saved_group):
            del group[foreign]
        group.update(settings_of(saved_group))


def _refuse_other_division(current: list[Group], saved: list[Group]) -> None:
    """Raise ValueError if the groups that Megatron cannot tell from one another are more than before, or fewer."""
    if len(current) > len(saved) or are_divided_otherwise(current, saved):
        raise _other_division(current, saved)


def _other_division(current: list[Group], saved: list[Group]) -> ValueError:
    return ValueError(
        f"the optimizer of the checkpoint has {len(saved)} parameter groups, that of this run {len(current)}: "
        f"resume with the flags that divide them as they were when it was saved (--mtp-lr, --mtp-min-lr, "
        f"--mtp-weight-decay, --decoupled-lr), or leave its state out with --no-load-optim"
    )


def remember_learning_rates(call: Call) -> None:
    """Wraps OptimizerParamScheduler.__init__: the run's learning rates, before a checkpoint brings others."""
    call.proceed()
    call.instance._mtp_patches_rates_of_run = [_rates(group) for group in call["optimizer"].param_groups]


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
    saved = [_rates(group) for group in scheduler.optimizer.param_groups]
    differing = {(_spell(own), _spell(kept)) for own, kept in zip(rates, saved, strict=True) if own != kept}
    for own, kept in sorted(differing):
        text = f"A parameter group goes on with what the checkpoint has ({kept}), not with what this run sets ({own})"
        log_single_rank(logger, logging.WARNING, f"{text}: add --override-opt-param-scheduler to take the run's")


def _spell(rates: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rates.items())


def _rates(group: Group) -> dict[str, Any]:
    """The learning rates and weight decays that a group has in place of the schedule's."""
    return {name: group[name] for name in ("max_lr", "min_lr", "start_wd", "end_wd") if group.get(name) is not None}


def save_own_state_of_each_param(call: Call) -> Any:
    """Wraps DistributedOptimizer.sharded_param_state_fully_reshardable, which indexes the gathered state of buffers."""
    optimizer = call.instance
    buffers = optimizer.buffers
    optimizer.buffers = [without_padding(buffer) for buffer in buffers]
    try:
        return call.proceed()
    finally:
        optimizer.buffers = buffers


def refresh_offloaded_params(call: Call) -> None:
    """Wraps DistributedOptimizer._copy_model_params_to_main_params, which leaves an offloaded optimizer to itself.

    NVIDIA/Megatron-LM#5071: that one refreshes only what it holds in fp32 of weights in half precision. Unless it is
    precision-aware, its weights are the shards in fp32, which are to be refreshed first as without offloading, and then
    its copies of them.
    """
    call.proceed()
    offloaded = call.instance.optimizer
    copies = getattr(offloaded, "param_to_inner_param", None)  # HybridDeviceOptimizer's
    if copies is None:
        return
    if not call.instance.ddp_config.use_megatron_fsdp:
        without_offloading = copy.copy(call.instance)
        without_offloading.optimizer = None
        call.proceed(without_offloading)
    for param, inner_param in copies.items():
        if inner_param is not param:
            inner_param.data.copy_(param)


def leave_out_new_tensor_properties(call: Call) -> Any:
    """Wraps TorchDistLoadShardedStrategy.load_tensors_metadata, which passes torch.empty all properties of a tensor."""
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    metadata = call["metadata"]
    if metadata is None:
        metadata = _get_filesystem_reader(call["checkpoint_dir"]).read_metadata()
    call["metadata"] = with_properties_of_empty(metadata)
    return call.proceed()
