"""Losses of routers, and models whose experts' communication overlaps, for reproductions of experts."""

from __future__ import annotations

from typing import Any

import torch

from .lab import LENGTH, make_config, make_generator, make_gpt, norm, start, sum_over_ranks

EXPERTS, WIDTH = 4, 16


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
        norm_of_router_gradient(samples, is_padded, moe_router_load_balancing_type=balancing, **settings, **per_token)
        for per_token in ({}, {"calculate_per_token_loss": True})
    )
    return without, with_tokens


def router_weight() -> Any:
    """The weight of a router, [experts, width]."""
    return torch.randn(EXPERTS, WIDTH, generator=make_generator(1))


def router_inputs(rank: int, samples: int, is_padded: bool) -> tuple[Any, Any]:
    """A rank's hidden states, [length / 2, samples, width], and which of them are padding, [length / 2, samples]."""
    hidden_states = torch.randn(LENGTH // 2, samples, WIDTH, generator=make_generator(rank + 2))
    is_padding = torch.zeros(LENGTH // 2, samples, dtype=torch.bool)
    is_padding[-3:] = bool(is_padded and rank)
    return hidden_states, is_padding


def make_router(groups: Any = None, **settings: Any) -> Any:
    """A router with `router_weight`, on Megatron's groups of ranks; a setting is one of TransformerConfig."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    config = make_config(hidden_size=WIDTH, num_moe_experts=EXPERTS, add_bias_linear=False, **settings)
    router = TopKRouter(config, groups or ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(router_weight())
    return router


def norm_of_router_gradient(samples: int, is_padded: bool, **settings: Any) -> float:
    """The norm of a router's gradient from its losses on two tensor-parallel ranks."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    router = make_router(tensor_model_parallel_size=2, sequence_parallel=True, **settings)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    hidden_states, is_padding = router_inputs(torch.distributed.get_rank(), samples, is_padded)
    scores, _ = router(hidden_states, is_padding) if is_padded else router(hidden_states)
    (0 * scores.sum()).backward()
    gradient = router.weight.grad.clone()
    torch.distributed.all_reduce(gradient)
    tokens = sum_over_ranks(float((~is_padding).sum())) if router.config.calculate_per_token_loss else 1.0
    return norm(gradient) / tokens


def make_overlapping_gpt(**settings: Any) -> Any:
    """A GPT in bf16 on two expert-parallel ranks, for --overlap-moe-expert-parallel-comm."""
    from megatron.core.pipeline_parallel.utils import set_streams

    start(expert_model_parallel_size=2)
    set_streams()
    defaults: dict[str, Any] = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    defaults |= {"bf16": True, "params_dtype": torch.bfloat16, "add_bias_linear": False, "init_method_std": 0.2}
    return make_gpt(make_config(**(defaults | settings)), transformer_engine=True).bfloat16()


def run_overlapping(model: Any, ids: Any, positions: Any, gradient: float = 0.0, **batch: Any) -> None:
    """Run a microbatch by the schedule of that overlap, with this gradient of the main loss of each token."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

    plan = model.build_schedule_plan(ids, positions, None, **batch)
    loss = TransformerModelChunkSchedulePlan.run(plan, None)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=torch.full_like(loss, gradient))


def logged_z_loss(**settings: Any) -> tuple[float, float]:
    """The mean of the z losses of two ranks with hidden states of their own, and what the log says on the first one.

    Both losses are of the form of ST-MoE: the mean of the squared logarithm of the sum of exponents.
    """
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    router = make_router(moe_router_load_balancing_type="none", moe_z_loss_coeff=1.0, **settings)
    hidden_states, _ = router_inputs(torch.distributed.get_rank(), 1, False)
    router(hidden_states)
    own = (hidden_states.double() @ router_weight().double().t()).logsumexp(-1).square().mean()
    log: dict[str, torch.Tensor] = {}
    track_moe_metrics(1.0, 1, total_loss_dict=log, track_names=["z_loss"], num_layers=router.config.num_layers)
    return sum_over_ranks(float(own)) / 2, float(log["z_loss"]) * router.config.num_layers
