"""Declares fsdp-without-master-weights."""

from ..engine import Patch, Probe, PullRequest, Wrap

_OPTIMIZER = "megatron.core.optimizer"
_WRAPPERS = "megatron_overrides.fsdp.main_weights"
_COUNT_ZEROS = "megatron_overrides.norms.zero_counts:count_zeros_without_params"

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
    problem="On 0.16.1 and 0.17.1 `--use-megatron-fsdp` with `--use-precision-aware-optimizer` trains nothing and "
    "prints no error: FusedAdam reads `param.decoupled_grad`, but Megatron-FSDP sets `param.grad`. The loss in the "
    "log is that of the initial weights, and the norm looks healthy. In addition FusedAdam copies the fp32 main "
    "weights, which Megatron-FSDP already has: 4 bytes for each element of a rank's shard.",
    adds=(
        "Megatron-FSDP provides its gradients under the name that FusedAdam reads. The norm, clipping, the threshold "
        "of `--grad-norm-skip-threshold`, the separate norm of MTP heads (Megatron's MTP layers) and "
        "`--log-num-zeros-in-grad` use the same gradients.",
        "FusedAdam updates the main weights of Megatron-FSDP and has no copy of them (no master weights).",
        "With Megatron-FSDP `--use-distributed-optimizer` is set, with a warning. "
        "`--reuse-grad-buf-for-mxfp8-param-ag` is unset, because Megatron-FSDP has no such buffer.",
    ),
    repairs=(
        "From 0.18 on, `--finetune` and `--no-load-optim` with fp16 or bf16 ended in a NotImplementedError of "
        "`optimizer.reload_model_params()`.",
        "A model that a script built without `megatron_fsdp_use_decoupled_grad` trained nothing, and its gradient "
        "norm was 0.",
        "`--log-num-zeros-in-grad` counted each zero once for each data-parallel rank, or raised an error with "
        "experts, tensor parallelism or several optimizer instances (0.18.2), and raised an IndexError on a rank "
        "without parameters, with fp8 other than delayed scaling (0.19.2, main).",
        "Where model weights were changed before `optimizer.reload_model_params()`, the main weights stayed as they "
        "were, and the next update wrote the old ones back (0.16.1, 0.17.1).",
        "FusedAdam kept `store_param_remainders` for master weights that it no longer has (0.19.2, main).",
    ),
    refuses=("Megatron-FSDP with an `--optimizer` other than adam and sgd.",),
    numerics="Only with both flags, where nothing was trained before.",
    notes=(
        "Checkpoints: with Megatron-FSDP FusedAdam's state has no `master_param`, as in newer releases. An old "
        "`fsdp_dtensor` checkpoint has one, which is not read.",
    ),
    is_repair=True,
    probe=Probe(
        f"{_OPTIMIZER}:get_megatron_optimizer", contains="setattr(optimizer_part.optimizer, 'master_weights', False)"
    ),
    edits=(
        Wrap(
            f"{_OPTIMIZER}:_get_megatron_optimizer_based_on_param_groups", f"{_WRAPPERS}:build_without_master_weights"
        ),
        Wrap(
            f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params",
            f"{_WRAPPERS}:reload_main_weights",
        ),
        Wrap(f"{_OPTIMIZER}.clip_grads:count_zeros_fp32", "megatron_overrides.norms.zero_counts:count_zeros_of_fsdp"),
        Wrap(f"{_OPTIMIZER}.optimizer:MegatronOptimizer.count_zeros", _COUNT_ZEROS),
        Wrap(f"{_OPTIMIZER}.optimizer:ChainedOptimizer.count_zeros", _COUNT_ZEROS),
        Wrap(
            "megatron.training.arguments:validate_args", f"{_WRAPPERS}:enforce_megatron_fsdp_args", check_source=False
        ),
    ),
)
