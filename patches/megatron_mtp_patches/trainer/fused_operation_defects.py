"""Defects of fused operations, most of them TransformerEngine's, that replace Megatron's layers."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_tensor_parallel, is_hybrid, layers_of_hybrid, tensor_parallel
from ..defects.declare import Defect, Sign

_TE = "megatron.core.extensions.transformer_engine"
_FUSED_MLA = "megatron.core.transformer.multi_latent_attention:FusedMLASelfAttention"
_IN_GPT = (
    "--mla-down-proj-fusion in a GPT with --transformer-impl transformer_engine and without "
    "--experimental-attention-variant dsa"
)


def _fuses_down_projection(run: Any) -> bool:
    """True if MLA has one down projection; up to 0.18 hybrid models do not read the setting."""
    has_unfused_layers = run.experimental_attention_variant == "dsa" or layers_of_hybrid(run)
    has_transformer_engine = run.transformer_impl in (None, "transformer_engine")
    return bool(run.mla_down_proj_fusion and has_transformer_engine and not has_unfused_layers)


def _fuses_dense_layers(run: Any) -> bool:
    """True if the trainer hands its setting to dense layers, as Megatron's own has done since 0.19."""
    is_before_0_19 = run.gtp_weight_remat_size is None  # it has no such argument
    return bool(run.use_transformer_engine_op_fuser and not (run.is_of_megatron_trainer and is_before_0_19))


DEFECTS = (
    Defect(
        id="ML-5850",
        effect="Each expert adds the bias of its second layer in full, not multiplied by the router's probability",
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
        "--disable-bias-linear, with --expert-tensor-parallel-size 1 and TransformerEngine 2.14 or newer (Megatron "
        "refuses others)",
        only_if="the activation is one that TransformerEngine fuses (SwiGLU, quick GEGLU or squared ReLU)",
        instead="leave out --use-transformer-engine-op-fuser",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="experts of 0.17.1, which has no such flag, of 0.18.2 and of 0.19.0; what 0.18.2 refuses; "
        "doctor under its flags and just outside",
    ),
    Defect(
        id="ML-6132",
        effect="A dense MLP computes with weights whose all-gather may not have ended, because it is fused in the "
        "first step, when the hooks that wait for it are off, and never calls them",
        severity=3,
        signs=Sign(f"{_TE}:TEFusedMLP._register_hooks_on_fused_impl", has="for submodule in self.modules():"),
        affects=lambda run: (
            _fuses_dense_layers(run)
            and run.overlap_param_gather
            and not run.use_megatron_fsdp
            and not run.num_experts
            and not is_hybrid(run)
        ),
        when="--use-transformer-engine-op-fuser with --overlap-param-gather, in a GPT without --num-experts and "
        "--use-megatron-fsdp (before 0.19 not in Megatron's own trainer, which does not fuse dense layers)",
        only_if="the gather ends too late (a race) and dense layers are fused, as Megatron-Bridge and, from 0.19 on, "
        "Megatron's own trainer do",
        instead="leave out --use-transformer-engine-op-fuser",
        state="fixed on main",
        evidence="reproduced",
        second_reading="fused layers of 0.16.1, 0.19.0 and main; which layers the trainers of 0.18.2 and 0.19.0 fuse; "
        "the thread of #6132; doctor under its flags",
    ),
    Defect(
        id="ML-5487b",
        effect="The first step ends in a RuntimeError about a main_grad, because TransformerEngine gives the fused "
        "experts new random weights; with --no-gradient-accumulation-fusion they compute with these, and the "
        "weights of the model do not train",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.moe.experts:TEGroupedMLP._make_fused_ops",
            has="fc1_single_grouped_weight",
            lacks="register_grouped_linear_params",
        ),
        affects=lambda run: (
            run.moe_single_grouped_weight
            and run.use_transformer_engine_op_fuser
            and run.num_experts
            and run.moe_grouped_gemm
            and run.fp8
            and run.fp8_recipe == "mxfp8"
            and expert_tensor_parallel(run) == 1
        ),
        when="--moe-single-grouped-weight with --use-transformer-engine-op-fuser, --num-experts, --moe-grouped-gemm, "
        "--fp8-format, --fp8-recipe mxfp8 and --expert-tensor-parallel-size 1 (Megatron refuses others)",
        only_if="TransformerEngine does not ignore --moe-single-grouped-weight, as newer ones do unless "
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM=1 is set",
        instead="leave out --moe-single-grouped-weight",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="experts of 0.18.2 and 0.19.0; the grouped linear of TransformerEngine 2.17; what 0.18.2 "
        "refuses; doctor under its flags",
    ),
    Defect(
        id="ML-5999",
        effect="Layers with SiLU compute ReLU",
        severity=3,
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
        evidence="reproduced",
        more_links=("NVIDIA/Megatron-LM#3278",),
        second_reading="the operation, and the activations that a configuration accepts, of 0.16.1 to main; the "
        "threads of #5999 and #3278",
    ),
    Defect(
        id="ML-5383",
        effect="The first layer ends in a RuntimeError about split_with_sizes, because each tensor-parallel rank takes "
        "its part of the fused down projection of MLA for all of it",
        kind="crash",
        severity=3,
        signs=Sign(f"{_FUSED_MLA}._qkv_down_projection", lacks="tp_size"),
        affects=lambda run: _fuses_down_projection(run) and tensor_parallel(run) > 1,
        when=f"{_IN_GPT}, with --tensor-model-parallel-size > 1",
        instead="leave out --mla-down-proj-fusion",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="fused MLA, its layer specs and hybrid models of 0.17.1 to 0.19.0; its program; doctor with and "
        "without --sequence-parallel",
    ),
    Defect(
        id="ML-5273",
        effect="The first backward pass ends in an AttributeError about linear_kv_down_proj, which MLA with a fused "
        "down projection does not have",
        kind="crash",
        severity=3,
        signs=Sign(_FUSED_MLA, lacks="def backward_dw("),
        affects=lambda run: _fuses_down_projection(run) and run.delay_wgrad_compute,
        when=f"{_IN_GPT}, with --delay-wgrad-compute",
        instead="leave out --mla-down-proj-fusion",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="fused MLA, its layer specs, who calls backward_dw and what a configuration asks of "
        "--delay-wgrad-compute, of 0.17.1 to 0.19.0; its program; doctor under its flags",
    ),
)
