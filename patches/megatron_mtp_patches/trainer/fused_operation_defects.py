"""Defects of fused operations, most of them TransformerEngine's, that replace Megatron's layers."""

from ..defects.conditions import expert_tensor_parallel, tensor_parallel
from ..defects.declare import Defect, Sign

_TE = "megatron.core.extensions.transformer_engine"
_FUSED_MLA = "megatron.core.transformer.multi_latent_attention:FusedMLASelfAttention"

DEFECTS = (
    Defect(
        id="ML-5850",
        effect="The bias of each expert's second layer is not multiplied by the router's probability",
        severity=3,
        signs=Sign("megatron.core.transformer.moe.experts:TEGroupedMLP._is_fused_impl_supported", lacks="scale_bias"),
        affects=lambda run: (
            run.use_transformer_engine_op_fuser
            and run.num_experts
            and run.moe_grouped_gemm
            and run.add_bias_linear
            and expert_tensor_parallel(run) == 1
            and run.transformer_engine >= (2, 14)
        ),
        when="--use-transformer-engine-op-fuser with --num-experts and --moe-grouped-gemm, without "
        "--disable-bias-linear, and TransformerEngine 2.14 or newer",
        only_if="the activation is one that TransformerEngine fuses (SwiGLU, quick GEGLU or squared ReLU)",
        instead="leave out --use-transformer-engine-op-fuser",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-6132",
        effect="A dense MLP computes with weights whose all-gather may not have ended",
        severity=3,
        signs=Sign(f"{_TE}:TEFusedMLP._register_hooks_on_fused_impl", has="for submodule in self.modules():"),
        affects=lambda run: (
            run.use_transformer_engine_op_fuser
            and run.overlap_param_gather
            and not run.use_megatron_fsdp
            and not (run.num_experts and run.moe_layer_freq in (None, 1))
        ),
        when="--use-transformer-engine-op-fuser with --overlap-param-gather, in a model with dense layers",
        only_if="the gather ends too late (a race) and dense layers are fused, as Megatron's own trainer "
        "does from 0.19 on",
        instead="leave out --use-transformer-engine-op-fuser",
        more_links=("NVIDIA/Megatron-LM#6654",),
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-5487b",
        effect="Fused experts keep stale weights of their own beside the grouped one, so a step may train others than "
        "those that are used",
        severity=2,
        signs=Sign(
            "megatron.core.transformer.moe.experts:TEGroupedMLP._make_fused_ops",
            has="fc1_single_grouped_weight",
            lacks="register_grouped_linear_params",
        ),
        affects=lambda run: run.moe_single_grouped_weight and run.use_transformer_engine_op_fuser,
        when="moe_single_grouped_weight with --use-transformer-engine-op-fuser",
        state="fixed in 0.19.0",
        evidence="reported",
    ),
    Defect(
        id="ML-5999",
        effect="Layers with SiLU compute ReLU",
        severity=2,
        signs=Sign(
            f"{_TE}:TEActivationOp.__new__",
            has="elif config.activation_func == F.silu: layer_type = te.pytorch.ops.ReLU",
        ),
        affects=lambda run: (
            run.use_te_activation_func
            and not (run.swiglu or run.gated_linear_unit)
            and getattr(run.activation_func, "__name__", "") == "silu"
        ),
        when="use_te_activation_func with activation_func=F.silu that is not gated",
        instead="leave use_te_activation_func out",
        state="fixed after main of 2026-08-22",
        evidence="read",
        second_reading="sources of all releases; the pull request",
    ),
    Defect(
        id="ML-5383",
        effect="The first layer ends in a RuntimeError about split_with_sizes, because each tensor-parallel rank takes "
        "its part of the fused down projection of MLA for all of it",
        kind="crash",
        severity=3,
        signs=Sign(f"{_FUSED_MLA}._qkv_down_projection", lacks="tp_size"),
        affects=lambda run: run.mla_down_proj_fusion and tensor_parallel(run) > 1,
        when="--mla-down-proj-fusion with --tensor-model-parallel-size > 1",
        instead="leave out --mla-down-proj-fusion",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the fixing commit; its program",
    ),
    Defect(
        id="ML-5273",
        effect="The first backward pass ends in an AttributeError about linear_kv_down_proj, which MLA with a fused "
        "down projection does not have",
        kind="crash",
        severity=3,
        signs=Sign(_FUSED_MLA, lacks="def backward_dw("),
        affects=lambda run: run.mla_down_proj_fusion and run.delay_wgrad_compute,
        when="--mla-down-proj-fusion with --delay-wgrad-compute",
        instead="leave out --mla-down-proj-fusion",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the fixing commit; its program",
    ),
)
