"""Parameter groups of MTP heads, with their own learning rates and weight decay, beside those of the main model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list

SETTINGS = ("mtp_lr", "mtp_min_lr", "mtp_weight_decay")  # in the order of Rates
Group = dict[str, Any]


class Rates(NamedTuple):
    """The settings of the heads in place of those of the OptimizerConfig; None keeps the value of the run.

    Attributes:
        lr: the highest learning rate of the schedule.
        min_lr: the lowest one.
        weight_decay: the weight decay, which does not change in the course of the run.
    """

    lr: float | None
    min_lr: float | None
    weight_decay: float | None


def separate_heads(
    groups: Sequence[Group],
    heads: Collection[int],
    change: Callable[[Group], Group],
    on_any_rank: Callable[[list[bool]], list[bool]],
) -> list[Group]:
    """Divide each group into the parameters of the main model and those of the heads, alike on all ranks.

    A group that is empty on all ranks is left out. Megatron logs the learning rate of a group with `default_config`;
    where such groups hold only heads, the learning rate of the heads is logged.

    Args:
        groups: those of _get_param_groups, in the same order on all ranks.
        heads: the ids of the parameters of heads.
        change: returns the settings that the heads of a group have in place of the group's.
        on_any_rank: reduces a list of bools over the ranks by a logical or.
    """
    divided = [_divide(group["params"], heads) for group in groups]
    is_filled = on_any_rank([bool(params) for pair in divided for params in pair])
    has_others, has_heads = is_filled[::2], is_filled[1::2]
    logs_heads = not any(
        others_exist for group, others_exist in zip(groups, has_others, strict=True) if group.get("default_config")
    )
    separate: list[Group] = []
    for group, (others, own), others_exist, heads_exist in zip(groups, divided, has_others, has_heads, strict=True):
        if others_exist or not heads_exist:
            separate.append({**group, "params": others})
        if heads_exist:
            logged = {"default_config": True} if logs_heads and group.get("default_config") else {}
            separate.append({**group, **change(group), **logged, "params": own})
    return separate


def changed_settings(group: Group, rates: Rates, config: Any) -> Group:
    """The settings of a group of heads that differ from those of the main model's `group`.

    A multiplier that muP has given the group's learning rate is kept; --decoupled-lr is not.
    """
    changed: Group = {}
    if rates.lr is not None or rates.min_lr is not None:
        multiplier = _multiplier(group, config)
        min_lr = config.min_lr if rates.min_lr is None else rates.min_lr
        changed["default_config"] = False
        if rates.lr is not None:
            changed["max_lr"] = rates.lr * multiplier
        if min_lr is not None:
            changed["min_lr"] = min_lr * multiplier
    if rates.weight_decay is not None:
        changed |= {"start_wd": rates.weight_decay, "end_wd": rates.weight_decay}
    return changed


def _divide(params: Sequence[Any], heads: Collection[int]) -> tuple[list[Any], list[Any]]:
    """(other parameters, those of heads)"""
    return [param for param in params if id(param) not in heads], [param for param in params if id(param) in heads]


def _multiplier(group: Group, config: Any) -> float:
    rate = group.get("max_lr")
    is_decoupled = rate == getattr(config, "decoupled_lr", None) and any(
        getattr(param, "is_embedding_or_output_parameter", False) for param in group.get("params", ())
    )
    if not config.lr or rate is None or is_decoupled:
        return 1.0
    return float(rate / config.lr)


def separate_groups_of_heads(call: Call) -> Any:
    """Wraps _get_param_groups(model_chunks, config, config_overrides), whose groups are in the same order on all ranks.

    All ranks agree in one all-gather of objects, as Megatron does there.
    """
    from megatron_overrides.mtp.blocks import mtp_blocks

    groups, config = call.proceed(), call["config"]
    rates = Rates(*(getattr(config, name, None) for name in SETTINGS))
    if rates == Rates(None, None, None):
        return groups
    heads = {id(param) for block in mtp_blocks(as_list(call["model_chunks"])) for param in block.parameters()}
    change = functools.partial(changed_settings, rates=rates, config=config)
    return separate_heads(groups, heads, change, _on_any_rank)


def _on_any_rank(flags: list[bool]) -> list[bool]:
    flags_of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags_of_ranks, flags)
    return [any(column) for column in zip(*flags_of_ranks, strict=True)]
