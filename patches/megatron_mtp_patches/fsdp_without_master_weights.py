"""Declares fsdp-without-master-weights."""

from .engine import Patch, Probe, PullRequest, Wrap

_OPTIMIZER = "megatron.core.optimizer"
_OVERRIDES = "megatron_overrides.core.optimizer"

PATCH = Patch(
    id="fsdp-without-master-weights",
    summary=(
        "Megatron-FSDP trains with a precision-aware optimizer, and keeps one copy of its main weights instead of two"
    ),
    upstream=(
        PullRequest(4133, native_since="0.18.0"),
        PullRequest(4024, native_since="0.18.0"),
        PullRequest(4427, native_since="0.18.0"),
        PullRequest(4802, native_since="0.19.0"),
    ),
    problem=(
        "`--use-megatron-fsdp` with `--use-precision-aware-optimizer` trains nothing and reports nothing: FusedAdam "
        "reads `decoupled_grad`, Megatron-FSDP fills `grad`. And FusedAdam copies the fp32 main weights that "
        "Megatron-FSDP has anyway, 4 bytes for each element of a rank's shard."
    ),
    adds=(
        "Gradients have the name that FusedAdam reads, also for their norm, for clipping and for "
        "`--log-num-zeros-in-grad`.",
        "FusedAdam has no master weights.",
        "With Megatron-FSDP `--use-distributed-optimizer` is set, and the MXFP8 gradient buffer is not reused.",
    ),
    repairs=(
        "`--finetune` and `--no-load-optim` with fp16 or bf16 ended in a NotImplementedError.",
        "A model that a script built without `megatron_fsdp_use_decoupled_grad` trained nothing, silently.",
        "`--log-num-zeros-in-grad` counted none (0.18.2), and raised an IndexError on a rank without parameters.",
        "Main weights stayed as they were where model weights were changed before `optimizer.reload_model_params()`.",
    ),
    refuses=("Megatron-FSDP with an `--optimizer` other than adam and sgd.",),
    numerics="With both flags, where nothing was trained before.",
    notes=("Checkpoints: FusedAdam's state has no `master_param` with Megatron-FSDP, as in newer releases.",),
    probe=Probe(
        f"{_OPTIMIZER}:get_megatron_optimizer", contains="setattr(optimizer_part.optimizer, 'master_weights', False)"
    ),
    edits=(
        Wrap(
            f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups",
            f"{_OVERRIDES}:build_without_master_weights",
        ),
        Wrap(
            f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params",
            f"{_OVERRIDES}.distrib_optimizer:reload_main_weights",
        ),
        Wrap(f"{_OPTIMIZER}.clip_grads:count_zeros_fp32", f"{_OVERRIDES}.clip_grads:count_zeros_of_fsdp"),
        Wrap(f"{_OPTIMIZER}.optimizer:MegatronOptimizer.count_zeros", f"{_OVERRIDES}.optimizer:count_zeros_of_none"),
        Wrap(f"{_OPTIMIZER}.optimizer:ChainedOptimizer.count_zeros", f"{_OVERRIDES}.optimizer:count_zeros_of_none"),
        Wrap(
            "megatron.training.arguments:validate_args",
            "megatron_overrides.training.arguments:enforce_megatron_fsdp_args",
            check_source=False,
        ),
    ),
)
