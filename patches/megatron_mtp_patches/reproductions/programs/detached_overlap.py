"""The gradient norm of the main model from the loss of detached MTP heads, with --overlap-moe-expert-parallel-comm."""

from ..lab import make_config, make_gpt, norm, start, tokens

RANKS = 2


def reproduce():
    import torch
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    start(expert_model_parallel_size=2)
    set_streams()
    config = make_config(
        num_moe_experts=2,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        mtp_num_layers=1,
        mtp_detach_heads=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        init_method_std=0.2,
    )
    model = make_gpt(config, transformer_engine=True).bfloat16()
    ids, positions = tokens()
    plan = model.build_schedule_plan(ids, positions, None, labels=ids.roll(-1, 1))
    loss = TransformerModelChunkSchedulePlan.run(plan, None)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=torch.zeros_like(loss))  # leaves that of the heads
    main_model = [param.grad for name, param in model.named_parameters() if "mtp." not in name]
    return 0.0, norm(*(gradient for gradient in main_model if gradient is not None))
