"""The wrapper that puts the parameters of MTP heads into separate groups of the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.mtp.rates.head_groups import SETTINGS, Rates, changed_settings, separate_heads


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
