"""Which parameter group of a checkpoint belongs to which group of the run that loads it.

NVIDIA/Megatron-LM#4705. Megatron up to 0.18 tells groups by `KEYS` alone, which are the same for all learning rates.
0.19 adds the learning rates, so a run with other ones finds no group.
"""

from __future__ import annotations

from typing import Any

KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
# What a step changes, and what is no setting.
_CHANGING = {"params", "lr", "step", "weight_decay", "initial_lr"}

Group = dict[str, Any]


def pair_groups(current: list[Group], saved: list[Group]) -> list[Group] | None:
    """The group of `saved` that belongs to each of `current`; None if one has no counterpart.

    It has the same `KEYS`. Of several, it is the one with the same settings; if none has them, because the run has
    other learning rates, it is the one in the same place among those with the same keys.
    """
    pairs = []
    for group in current:
        alike = [one for one in saved if _key(one) == _key(group)]
        same = [one for one in alike if _settings(one) == _settings(group)]
        if not same:
            siblings = [one for one in current if _key(one) == _key(group)]
            if len(alike) != len(siblings):
                return None
            same = [alike[next(place for place, one in enumerate(siblings) if one is group)]]
        pairs.append(same[0])
    return pairs


def _key(group: Group) -> tuple[Any, ...]:
    """NeMo calls the multipliers pre_wd_mult and pre_lr_mult."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KEYS)


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name not in _CHANGING and value is not None}


def settings_of(group: Group) -> Group:
    """What a group has beside its parameters and their step."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}
