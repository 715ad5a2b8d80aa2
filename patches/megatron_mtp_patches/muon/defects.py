"""Muon and its family."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    data_parallel,
    expert_data_parallel,
    is_layer_wise,
    loads_optimizer,
    tensor_parallel,
)
from ..defects.declare import Defect, Gap, Sign


def _may_have_replicas(run: Any) -> bool:
    """True if several ranks have copies of a weight, or if no setting says how many ranks there are."""
    if not (run.world_size or run.data_parallel_size):
        return True
    return data_parallel(run) * context_parallel(run) > 1 or bool(run.num_experts and expert_data_parallel(run) > 1)


def _shards_gradients_of_whole_weights(run: Any) -> bool:
    """True if DDP reduces gradients for the distributed optimizer, and one that updates whole weights gets them.

    Arguments that validate_args of Megatron's trainer has read never say so.
    """
    updates_whole_weights = run.optimizer in ("muon", "adaptive_muon", "soap", "lion") and not is_layer_wise(run)
    return bool(updates_whole_weights and run.use_distributed_optimizer and not run.use_megatron_fsdp)


def _has_other_rows(run: Any) -> bool:
    """True if a QKV weight has its rows in another order than Megatron's, or not whole query groups, or no gate."""
    divides_groups = tensor_parallel(run) > (run.num_query_groups or run.num_attention_heads or tensor_parallel(run))
    trains_vision_tower = run.is_of_megatron_bridge and run.freeze_vision_model is False
    return bool(run.is_of_ms_swift or divides_groups or trains_vision_tower)


def _resumes_with_layout(run: Any) -> bool:
    """True if a layer-wise optimizer resumes that is to have a layout of parameters in DDP's buffers."""
    return bool(is_layer_wise(run) and run.use_layer_wise_param_layout is not False and loads_optimizer(run))


_WITH_LAYOUT = (  # the same in words
    "--load (without --no-load-optim or --finetune) with --optimizer dist_muon, or with another one than Adam and SGD "
    "and --use-distributed-optimizer, without --no-use-layer-wise-param-layout"
)


DEFECTS = (
    Defect(
        "ML-4113",
        "Muon updates whole weights although each rank has reduced only its own shard of their gradients, so the "
        "data-parallel replicas train different models",
        severity=5,
        signs=Sign(
            "megatron.core.optimizer:_get_megatron_emerging_optimizer",
            has=(
                "optimizer = FP32Optimizer(optimizer, config, init_state_fn)",
                "fallback_config.use_distributed_optimizer = False",
            ),
        ),
        affects=lambda run: _shards_gradients_of_whole_weights(run) and _may_have_replicas(run),
        when="--optimizer muon, adaptive_muon, soap or lion with --use-distributed-optimizer, in a trainer that does "
        "not turn them into the layer-wise optimizer as Megatron's does",
        introduced_by=("NVIDIA/Megatron-LM#4113",),
        evidence="reproduced",
        only_if="the run has several data-parallel ranks",
        instead="set use_distributed_optimizer to False in the configurations of DDP and of the optimizer",
        seen_by="copies",
        second_reading="sources of 0.17.1 to main; its program; doctor with muon, dist_muon and adam in Megatron's "
        "trainer",
    ),
    Defect(
        "layer-wise-layout-at-resume",
        "A resume from a checkpoint that was saved without the layout of parameters, which 0.18 has by default, ends "
        "in an error about flattened_range or a missing state",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.training.training:",
            has="use_layer_wise_param_layout=getattr(",
            lacks="builder.build_distributed_models(",
        ),
        affects=_resumes_with_layout,
        when=_WITH_LAYOUT,
        only_if="a Megatron before 0.18, or a run with --no-use-layer-wise-param-layout, has saved the checkpoint in "
        "the format torch_dist",
        instead="--no-use-layer-wise-param-layout",
        state="fixed in 0.19.0",  # by layer-wise-without-layout; main, which has the layout again, was not tried
        evidence="reproduced",
    ),
    Defect(
        "layer-wise-without-layout",
        "--no-use-layer-wise-param-layout is always on, so a resume from a checkpoint that 0.18 has saved without that "
        "flag ends in a KeyError about the state of the optimizer",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.training.training:setup_model_and_optimizer", has="return builder.build_distributed_models("
        ),
        fixed_by=Sign("megatron.training.models.dist_utils:", has="use_layer_wise_param_layout"),
        affects=_resumes_with_layout,
        when=_WITH_LAYOUT,
        only_if="Megatron 0.18 has saved the checkpoint, in the format torch_dist, and the script builds the model "
        "with a ModelBuilder, as pretrain_gpt.py and pretrain_hybrid.py do",
        instead="--no-load-optim, which begins with empty states, or go on with 0.18",
        state="fixed on main",
        evidence="reproduced",
    ),
    Defect(
        "ML-5394",
        "If the gradients of one module explode, clipping shrinks those of all others below the floor of "
        "Newton-Schulz (1e-7, and 1e-15 from emerging-optimizers 0.4.0 on), and Muon stops training them",
        severity=2,
        signs=Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.clip_grad_norm"),
        fixed_by=Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.skip_grad_norm_clip"),
        affects=lambda run: (
            "muon" in str(run.optimizer) and (run.clip_grad or 0.0) > 0.0 and not run.clip_orthogonalizing_optimizers
        ),
        when="--optimizer muon, adaptive_muon or dist_muon with --clip-grad above 0, as by default",
        more_links=("NVIDIA/Megatron-LM#5395",),
        state="open",
        evidence="reproduced",
        only_if="the gradients of one module are many orders of magnitude larger than those of the others",
        patch="exempt-muon-from-clipping",
        second_reading="sources of 0.16.1 to main; the issue and the pull request; doctor with Muon and Adam; its "
        "program",
    ),
    Defect(
        "EO-238",
        "Muon's update of a matrix shrinks with the norm of its gradient where that is below about 1e-9, though "
        "Newton-Schulz is meant to make it independent of the norm",
        severity=2,
        signs=Sign(
            "emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz", lacks="normalize_in_double"
        ),
        affects=lambda run: "muon" in str(run.optimizer),
        when="--optimizer muon, adaptive_muon or dist_muon",
        more_links=("NVIDIA-NeMo/Emerging-Optimizers#229", "NVIDIA-NeMo/Emerging-Optimizers#230"),
        state="fixed in emerging-optimizers 0.4.0",
        evidence="reproduced",
        only_if="the gradient of a matrix has a norm below 1e-9",
        patch="keep-newton-schulz-scale-invariant",
        second_reading="sources of emerging-optimizers 0.3.0, 0.3.1 and 0.4.0; the issue and both pull requests; "
        "doctor with Muon and Adam; its program",
    ),
    Defect(
        "ML-gated-qkv",
        "Muon orthogonalizes rows of query, gate, key and value together, or its first step raises an error",
        severity=4,
        signs=(
            Sign("megatron.core.optimizer.emerging_optimizers:_get_qkv_split_shapes", lacks="'attention_output_gate'"),
            Sign("megatron.core.optimizer.muon:get_megatron_muon_optimizer", has="'split_qkv': config.muon_split_qkv"),
        ),
        affects=lambda run: (
            run.attention_output_gate and "muon" in str(run.optimizer) and run.muon_split_qkv is not False
        ),
        when="--attention-output-gate with --optimizer muon, adaptive_muon or dist_muon, and muon_split_qkv, as by "
        "default",
        more_links=("NVIDIA/Megatron-LM#4728",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead="--muon-no-split-qkv, with which Muon orthogonalizes the whole weight as one matrix",
        patch="split-gated-qkv-for-muon",
        unless=Gap(
            _has_other_rows,
            when="ms-swift, more tensor-parallel ranks than query groups, or a vision tower of Megatron-Bridge that "
            "trains (freeze_vision_model: false)",
            because="it takes the rows of each QKV weight for whole query groups of query, gate, key and value, but "
            "ms-swift stores the gate of a head after its query, these ranks share a group, and the tower has no gate",
        ),
        second_reading="the fixing commit; sources of 0.16.1 to 0.19.0, of mcore-bridge and of Megatron-Bridge; its "
        "program; the rows of 16 heads in 2 groups on 4 tensor-parallel ranks; doctor with --muon-no-split-qkv and "
        "adaptive_muon",
    ),
)
