"""The match between the parameter groups of a checkpoint and those of the run that loads it.

NVIDIA/Megatron-LM#4705. Megatron up to 0.18 tells groups by `KEYS` alone, which are the same for all learning rates.
0.19 adds the learning rates, so a run with other ones finds no group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
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
