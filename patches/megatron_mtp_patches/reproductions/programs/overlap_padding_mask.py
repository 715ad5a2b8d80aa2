"""The gradient norm of routers from aux_loss with a padding mask and --overlap-moe-expert-parallel-comm. It is to be
that without the overlap.
"""

from ..lab import LENGTH, make_config, make_gpt, norm, start, tokens

RANKS = 2


def reproduce():
    import torch
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start(expert_model_parallel_size=2)
    set_streams()
    config = make_config(
        num_moe_experts=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        init_method_std=0.2,
    )
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    model = make_gpt(config, transformer_engine=True).bfloat16()
    ids, positions = tokens()
    batch = {"labels": ids.roll(-1, 1), "padding_mask": torch.arange(LENGTH).unsqueeze(0) >= LENGTH // 2}

    def take_gradient():
        gradients = [param.grad for name, param in model.named_parameters() if "router" in name]
        model.zero_grad()
        return norm(*(gradient for gradient in gradients if gradient is not None))

    (0 * model(ids, positions, None, **batch)).sum().backward()
    expected = take_gradient()
    plan = model.build_schedule_plan(ids, positions, None, **batch)
    loss = TransformerModelChunkSchedulePlan.run(plan, None)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=torch.zeros_like(loss))
    return expected, take_gradient()
