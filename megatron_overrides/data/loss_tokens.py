"""The wrapper that counts the tokens of a batch over context-parallel ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_overrides.call import Call


def divide_by_tokens_of_all_context_parallel_ranks(call: Call) -> Any:
    """Wraps forward_step_calc_loss: without per-token loss a microbatch's mean is one over all of its sequences.

    NVIDIA/Megatron-LM#7513: Megatron divides the sum of each context-parallel rank by the tokens of this rank. DDP then
    averages over these ranks, so the sum is multiplied by their number. One all-reduce of a number for each microbatch
    on the last stage. Hybrid context parallelism is left alone: its ranks have other numbers of microbatches.
    """
    config, loss_func = call["config"], call["loss_func"]
    is_per_token = getattr(config, "calculate_per_token_loss", False)  # a ModelParallelConfig has none
    if loss_func is None or is_per_token or getattr(config, "hybrid_context_parallel", False):
        return call.proceed()
    if call["collect_non_loss_data"] or call["cp_group_size"] == 1:
        return call.proceed()
    group = _context_parallel_group(call["model"])
    if group is None or group.size() == 1:
        return call.proceed()

    @functools.wraps(loss_func)
    def loss_over_all_tokens(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        if not isinstance(outputs, (tuple, list)) or len(outputs) != 3:  # a mean, or what is no loss
            return outputs
        loss, num_tokens, report = outputs
        num_tokens = num_tokens.to(loss.device, copy=True)  # NCCL reduces no number that lies on the host
        torch.distributed.all_reduce(num_tokens, group=group)
        return loss * group.size(), num_tokens, report

    call["loss_func"] = loss_over_all_tokens
    return call.proceed()


def _context_parallel_group(model: Any) -> Any:
    """The group of the model, which may be wrapped; else Megatron's own, None where it has made no groups."""
    from megatron.core import parallel_state

    while hasattr(model, "module"):
        model = model.module
    group = getattr(model, "cp_group", None)
    return parallel_state.get_context_parallel_group(check_initialized=False) if group is None else group
