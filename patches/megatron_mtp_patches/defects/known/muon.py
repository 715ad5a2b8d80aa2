"""Muon and its family."""

from __future__ import annotations

from ..declare import Defect, Sign

DEFECTS = (
    Defect(
        "ML-5394",
        "If the gradients of one module explode, clipping shrinks those of all others below the floor of "
        "Newton-Schulz, and Muon stops training them",
        kind="wrong numbers",
        severity=3,
        signs=(Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.clip_grad_norm"),),
        fixed_by=(Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.skip_grad_norm_clip"),),
        affects=lambda run: (
            "muon" in str(run.optimizer) and (run.clip_grad or 0.0) > 0.0 and not run.clip_orthogonalizing_optimizers
        ),
        when="--optimizer muon or dist_muon with --clip-grad",
        links=("NVIDIA/Megatron-LM#5394", "NVIDIA/Megatron-LM#5395"),
        state="open",
        evidence="reproduced",
        only_if="the gradients of one module are many orders of magnitude larger than those of the others",
        patch="exempt-muon-from-clipping",
    ),
    Defect(
        "EO-238",
        "Muon's update shrinks with the gradient where the norm of a matrix is below about 1e-9",
        kind="wrong numbers",
        severity=2,
        signs=(
            Sign("emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz", lacks="normalize_in_double"),
        ),
        affects=lambda run: "muon" in str(run.optimizer),
        when="--optimizer muon or dist_muon",
        links=("NVIDIA-NeMo/Emerging-Optimizers#238",),
        state="fixed in emerging-optimizers 0.4.0",
        evidence="reproduced",
        only_if="the gradient of a matrix has a norm below 1e-9",
        patch="keep-newton-schulz-scale-invariant",
    ),
    Defect(
        "ML-gated-qkv",
        "Muon orthogonalizes rows of query, gate, key and value together, or its first step raises an error",
        kind="wrong numbers",
        severity=4,
        signs=(
            Sign("megatron.core.optimizer.emerging_optimizers:_get_qkv_split_shapes", lacks="'attention_output_gate'"),
            Sign("megatron.core.optimizer.muon:get_megatron_muon_optimizer", has="'split_qkv': config.muon_split_qkv"),
        ),
        affects=lambda run: (
            run.attention_output_gate and "muon" in str(run.optimizer) and run.muon_split_qkv is not False
        ),
        when="--attention-output-gate with --optimizer muon or dist_muon",
        links=(),
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead="--muon-no-split-qkv",
        patch="split-gated-qkv-for-muon",
    ),
    Defect(
        "ML-6616",
        "Ranks order the parameter groups of dense weights and experts differently, so from 0.18 on they wait for each "
        "other in different collectives",
        kind="hang",
        severity=2,
        signs=(
            Sign(
                "megatron.core.optimizer:_get_param_groups",
                has="sorted(params_key, key=lambda x: (x[0] is not None, x[0]))",
            ),
        ),
        affects=lambda run: (
            "muon" in str(run.optimizer) and run.num_experts and (run.pipeline_model_parallel_size or 1) > 1
        ),
        when="--optimizer muon or dist_muon with --num-experts and --pipeline-model-parallel-size > 1",
        links=("NVIDIA/Megatron-LM#6616", "NVIDIA/Megatron-LM#1515"),
        state="open",
        evidence="reproduced",
        only_if="a pipeline stage meets experts before dense weights with the same settings, as where these are frozen",
        patch="order-param-groups-alike",
    ),
)
