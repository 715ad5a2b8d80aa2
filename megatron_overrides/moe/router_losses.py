"""The weight of MoE losses where gradients are divided by tokens (--calculate-per-token-loss).

`finalize_model_grads` then divides by the tokens of all ranks, so a router multiplies its losses by the tokens of its
own times the ranks that have parts of the same sequences, those of `tp_cp_group`. NVIDIA/Megatron-LM#5047: up to 0.18
routers leave out these ranks, and (#5798) seq_aux_loss the samples of a microbatch. #7481: with a padding mask they
take the tokens of all these ranks for their own, because the all-reduce of their counts is in place.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_overrides.call import Call


def weight_aux_loss(call: Call) -> Any:
    """Wraps TopKRouter.attach_and_log_load_balancing_loss, which multiplies the loss by `valid_token_count`."""
    count = call["valid_token_count"]
    count = call["activation"].shape[0] if count is None else count
    call["valid_token_count"] = count * call.instance.tp_cp_group.size()
    return call.proceed()


def weight_seq_aux_loss(call: Call) -> Any:
    """Wraps TopKRouter._apply_seq_aux_loss, which counts the tokens of one of `bsz` samples."""
    attach, samples = call.instance.attach_and_log_load_balancing_loss, call["bsz"]

    def attach_for_all_samples(*args: Any, valid_token_count: Any, **kwargs: Any) -> Any:
        return attach(*args, valid_token_count=valid_token_count * samples, **kwargs)

    return _proceed_with(call, attach_for_all_samples)


def weight_z_loss(call: Call) -> Any:
    """Wraps TopKRouter.apply_z_loss, which logs the loss without its coefficient."""
    router = call.instance
    if not router.calculate_per_token_loss or router.config.moe_z_loss_coeff is None:
        return call.proceed()
    weighted = copy.copy(router)
    weighted.config = copy.copy(router.config)
    weighted.config.moe_z_loss_coeff *= router.tp_cp_group.size()
    return call.proceed(weighted)


def count_tokens_once(call: Call) -> Any:
    """Wraps get_tokens_per_expert_and_token_count: (tokens per expert of the group, tokens of a rank, all tokens).

    Each rank's part of a loss has the same weight, so with padding the second is the mean over the group's ranks.
    """
    tokens_per_expert, tokens_of_rank, all_tokens = call.proceed()
    if call["with_padding_mask"]:
        tokens_of_rank = all_tokens / call["reduce_group"].size()
    return tokens_per_expert, tokens_of_rank, all_tokens


def weight_experts_by_all_tokens(call: Call) -> Any:
    """Wraps TopKRouter._apply_global_aux_loss, whose counts of experts are those of all microbatches of a step so far.

    NVIDIA/Megatron-LM#7213: it divides their mean by the tokens of the current microbatch. An expert's share is that of
    all tokens that were counted, as it is where all microbatches have the same number.
    """
    router = call.instance
    if not router.get_aux_loss_coeff("global_aux_loss"):
        return call.proceed()
    attach, before = router.attach_and_log_load_balancing_loss, router.global_tokens_per_expert.sum()
    choices_of_ranks = call["routing_map"].shape[0] * router.topk * router.tp_dp_cp_group.size()

    def attach_by_all_tokens(activation: Any, aux_loss_coeff: float, aux_loss: Any, *args: Any, **kwargs: Any) -> Any:
        counted = router.global_tokens_per_expert.sum()
        current = counted - before if call["with_padding_mask"] else choices_of_ranks
        aux_loss = aux_loss * (current * router.ga_steps / counted)
        return attach(activation, aux_loss_coeff, aux_loss, *args, **kwargs)

    return _proceed_with(call, attach_by_all_tokens)


def sum_over_replicas(call: Call) -> Any:
    """Wraps TopKRouter._apply_global_aux_loss, whose loss is the part of this rank's tokens in that of all ranks.

    NVIDIA/Megatron-LM#5007: the gradients of these parts are averaged over the data-parallel ranks, not added up. The
    log shows the loss divided by its coefficient, so both are multiplied.
    """
    router = call.instance
    if not getattr(router.config, "moe_global_aux_loss_over_data_parallel", False):
        return call.proceed()
    attach = router.attach_and_log_load_balancing_loss
    replicas = router.tp_dp_cp_group.size() // router.tp_cp_group.size()

    def attach_sum(activation: Any, aux_loss_coeff: float, aux_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return attach(activation, aux_loss_coeff * replicas, aux_loss * replicas, *args, **kwargs)

    return _proceed_with(call, attach_sum)


def _proceed_with(call: Call, attach: Any) -> Any:
    """Call the method of a router that hands its loss to `attach`."""
    router = copy.copy(call.instance)
    router.attach_and_log_load_balancing_loss = attach
    return call.proceed(router)
