"""What reproductions of MoE losses share."""

from __future__ import annotations

from typing import Any

from .lab import LENGTH, make_config, norm, start, sum_over_ranks

EXPERTS = 4


def norms_of_router_gradients(
    balancing: str = "none", samples: int = 1, is_padded: bool = False, **settings: Any
) -> tuple[float, float]:
    """The norm of a router's gradient from its losses on two tensor-parallel ranks.

    Without and with calculate_per_token_loss, under which `finalize_model_grads` divides by the tokens of all ranks.
    They are the same.

    Args:
        balancing: which auxiliary loss there is.
        samples: the micro batch size.
        is_padded: whether three positions of the second rank are padding.
    """
    start(tensor_model_parallel_size=2)
    without, with_tokens = (
        _norm_of_router_gradient(samples, is_padded, moe_router_load_balancing_type=balancing, **settings, **per_token)
        for per_token in ({}, {"calculate_per_token_loss": True})
    )
    return without, with_tokens


def _norm_of_router_gradient(samples: int, is_padded: bool, **settings: Any) -> float:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    rank = torch.distributed.get_rank()
    config = make_config(
        num_moe_experts=EXPERTS, tensor_model_parallel_size=2, sequence_parallel=True, add_bias_linear=False, **settings
    )
    torch.manual_seed(1)
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, config.hidden_size))
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    torch.manual_seed(rank + 2)
    hidden_states = torch.randn(LENGTH // 2, samples, config.hidden_size)
    is_padding = torch.zeros(LENGTH // 2, samples, dtype=torch.bool)
    is_padding[-3:] = bool(is_padded and rank)
    scores, _ = router(hidden_states, is_padding) if is_padded else router(hidden_states)
    (0 * scores.sum()).backward()
    gradient = router.weight.grad.clone()
    torch.distributed.all_reduce(gradient)
    tokens = sum_over_ranks(float((~is_padding).sum())) if config.calculate_per_token_loss else 1.0
    return norm(gradient) / tokens
