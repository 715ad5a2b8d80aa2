"""The match between the parameter groups of a checkpoint and those of the run that loads it.

NVIDIA/Megatron-LM#4705. Megatron up to 0.18 tells groups by `KEYS` alone, which are the same for all learning rates.
0.19 adds the learning rates, so a run with other ones finds no group.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.settings.checks import spell

KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
# Settings without which a run has fewer groups.
_DIVIDING = ("mtp_lr", "mtp_min_lr", "mtp_weight_decay", "decoupled_lr")
# What Megatron says of groups that it cannot put into those of a checkpoint, and where they are in the state.
_UNEQUAL_GROUPS = re.compile(r"lists with different lengths .* at level (\(.*'param_groups',?\))")
# What a step changes, and what is no setting.
_CHANGING = {"params", "lr", "step", "weight_decay", "initial_lr"}

Group = dict[str, Any]


def pair_groups(current: list[Group], saved: list[Group]) -> list[Group] | None:
    """The group of `saved` that belongs to each of `current`; None if one has no counterpart.

    It has the same `KEYS`. Of several, it is the one with the same settings, of those that a group of this run has; if
    not all of them have such a counterpart, because the run has other learning rates, each belongs to the one in the
    same place among those with the same keys.
    """
    names = sorted({name for group in current for name in group} - _CHANGING)
    pairs: dict[int, Group] = {}
    for key in {_key(group) for group in current}:
        places = [place for place, group in enumerate(current) if _key(group) == key]
        alike = [group for group in saved if _key(group) == key]
        matches = [_find(current[place], alike, names) for place in places]
        counterparts = [match for match in matches if match is not None]
        if len(counterparts) < len(places):
            counterparts = alike
        if len(counterparts) != len(places):
            return None
        pairs |= dict(zip(places, counterparts, strict=True))
    return [pairs[place] for place in range(len(current))]


def are_divided_otherwise(current: list[Group], saved: list[Group]) -> bool:
    """True if the checkpoint has groups with some `KEYS`, but not as many as this run."""
    before = Counter(map(_key, saved))
    return any(before.get(key, number) != number for key, number in Counter(map(_key, current)).items())


def _find(group: Group, among: list[Group], names: list[str]) -> Group | None:
    """The first group with the same settings."""
    return next((one for one in among if _settings(one, names) == _settings(group, names)), None)


def _key(group: Group) -> tuple[Any, ...]:
    return _settings(group, KEYS)


def _settings(group: Group, names: Iterable[str]) -> tuple[Any, ...]:
    """The values of these settings, None where there is none; NeMo calls wd_mult pre_wd_mult, for example."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


def with_steps(groups: list[Group]) -> list[Group]:
    """The groups; those without a step have the largest of the others, if these have one."""
    steps = [group["step"] for group in groups if group.get("step") is not None]
    if not steps:
        return groups
    return [group if group.get("step") is not None else {**group, "step": max(steps)} for group in groups]


def settings_of(group: Group) -> Group:
    """Return the settings of a group: all but its parameters and their step."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


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


def refuse_other_division(call: Call) -> Any:
    """Wraps load(sharded_state_dict, checkpoint_dir, ...) of the format torch_dist.

    It puts the groups of a run into those of the checkpoint one by one, unless the optimizer is distributed.

    Raises:
        ValueError: one has more groups than the other; the message names the settings that divide them.
    """
    try:
        return call.proceed()
    except ValueError as error:
        level = _UNEQUAL_GROUPS.search(str(error))
        if level is None:
            raise
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        saved, current = load_common_state_dict(call["checkpoint_dir"]), call["sharded_state_dict"]
        for key in ast.literal_eval(level[1]):
            saved, current = saved[key], current[key]
        raise _other_division(current, saved) from error


def _other_division(current: list[Group], saved: list[Group]) -> ValueError:
    lines = [
        f"the optimizer of the checkpoint has {len(saved)} parameter groups, that of this run {len(current)}: resume "
        f"with the settings that divide them as they were when it was saved ({', '.join(map(spell, _DIVIDING))}), or "
        f"leave its state out with --no-load-optim (Megatron-Bridge: checkpoint.load_optim=False; verl: "
        f"checkpoint.load_contents=[model,extra])"
    ]
    for owner, groups, others in (("the checkpoint", saved, current), ("this run", current, saved)):
        rates = [rates_of(group) for group in others]
        lacking = {spell_rates(rates_of(group)) for group in groups if rates_of(group) not in rates}
        lines += [f"only {owner} has a group with {text}" for text in sorted(lacking)]
    return ValueError("; ".join(lines))


def rates_of(group: Group) -> dict[str, Any]:
    """The learning rates and weight decays that a group has in place of the schedule's."""
    return {name: group[name] for name in ("max_lr", "min_lr", "start_wd", "end_wd") if group.get(name) is not None}


def spell_rates(rates: dict[str, Any]) -> str:
    """Such rates as text."""
    return ", ".join(f"{name} {value:g}" for name, value in rates.items()) or "the rates of the schedule"
