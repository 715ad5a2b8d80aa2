"""Edits that several patches need, and the names of the targets they share. The engine installs each of them once."""

from ..engine import Override, Wrap

_REPORT = "megatron_overrides.report.megatron_log"
_TRAINING = "megatron.training.training"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"
_STEP = "megatron_overrides.norms.optimizer_step"

# -- multi-token prediction -------------------------------------------------------------------------------------------

MTP = "megatron.core.transformer.multi_token_prediction"

MTP_LOSS = (
    Override(
        f"{MTP}:process_mtp_loss", "megatron_overrides.mtp.losses.process_mtp_loss:process_mtp_loss", where="everywhere"
    ),
    # 0.16 has the loss inside GPTModel, which must then call ours.
    Wrap(f"{_GPT}._postprocess", "megatron_overrides.mtp.losses.postprocess:call_process_mtp_loss"),
)

_HELPER = f"{MTP}:MTPLossLoggingHelper"
_OUR_HELPER = "megatron_overrides.mtp.metrics.tracker:MTPLossLoggingHelper"
_METRICS = ("save_metrics_to_tracker", "clean_metrics_in_tracker", "reduce_metrics_in_tracker")
_LOSSES = ("save_loss_to_tracker", "clean_loss_in_tracker", "reduce_loss_in_tracker")
MTP_TRACKER = (
    *(Override(f"{_HELPER}.{name}", f"{_OUR_HELPER}.{name}", where="everywhere") for name in (*_METRICS, *_LOSSES)),
    Override(f"{_HELPER}.track_mtp_metrics", f"{_OUR_HELPER}.track_mtp_metrics"),
)

# The loss learns which tokens the model sees and whether it is needed; the heads run only if it is.
_RECORD_INPUTS = "megatron_overrides.mtp.forward_pass:record_forward_inputs"
MTP_FORWARD_PASS = (
    Wrap(f"{_GPT}._postprocess", _RECORD_INPUTS),
    Wrap("megatron.core.models.hybrid.hybrid_model:HybridModel.forward", _RECORD_INPUTS),
    Wrap("megatron.core.models.mamba.mamba_model:MambaModel.forward", _RECORD_INPUTS),
    Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", "megatron_overrides.mtp.forward_pass:skip_idle_block"),
)

# Megatron-FSDP around a model: up to 0.19, and on main.
MEGATRON_FSDP = tuple(
    f"megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel{version}"
    for version in ("", "V1", "V2")
)

# Classes that wrap a model for data parallelism.
_DATA_PARALLEL = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
    "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
)


def wrap_data_parallel(override: str) -> tuple[Wrap, ...]:
    """Return the edits for what is to happen before any of them, or Megatron-FSDP, sees the model."""
    return (
        *(Wrap(f"{name}.__init__", override, check_source=False) for name in _DATA_PARALLEL),
        *(Wrap(f"{name}.__init__", override) for name in MEGATRON_FSDP),
    )


# Megatron-FSDP where some parameters do not train, and checkpoints, whose optimizer state is that of the others.
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_DATA_PARALLELISM = "megatron_overrides.mtp.frozen.data_parallelism"
_CHECKPOINTING = "megatron.training.checkpointing"
_OPTIMIZER_STATE = "megatron_overrides.mtp.frozen.optimizer_state"
FROZEN_PARAMETERS = (
    Wrap(
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._register_fsdp_hooks",
        f"{_DATA_PARALLELISM}:register_no_hook_on_frozen_parameters",
    ),
    Wrap(
        f"{_FSDP}.param_and_grad_buffer:ParamAndGradBuffer.reduce_scatter_gradients",
        f"{_DATA_PARALLELISM}:reduce_groups_that_train",
    ),
    Wrap(f"{_CHECKPOINTING}:load_checkpoint", f"{_OPTIMIZER_STATE}:watch_for_other_state", check_source=False),
    Wrap(f"{_CHECKPOINTING}:_load_base_checkpoint", f"{_OPTIMIZER_STATE}:refuse_other_state", check_source=False),
)

# No gradient of the MTP loss leaves the heads.
_DETACHED_HEADS = "megatron_overrides.mtp.heads.detached_heads"
DETACHED_HEADS = (
    *MTP_LOSS,
    Wrap(f"{MTP}:MultiTokenPredictionBlock.forward", f"{_DETACHED_HEADS}:detach_block"),
    Wrap(f"{MTP}:MultiTokenPredictionLayer._get_embeddings", f"{_DETACHED_HEADS}:detach_inputs"),
)

# The layer under the 1F1B overlap of experts: up to 0.18, and from 0.19 on.
SCHEDULED_MTP_LAYER = (
    "megatron.core.models.gpt.fine_grained_callables:build_mtp_layer_callables",
    "megatron.core.models.common.fine_grained_callables:build_mtp_layer_callables",
)

_MOE = "megatron.core.transformer.moe"


def divide_aux_losses(override: str) -> tuple[Wrap, ...]:
    """Return the edits by which `override` divides the sum of auxiliary losses for the log by a number of layers."""
    # Where Megatron divides it: up to 0.17, and from 0.18 on.
    divisions = (f"{_MOE}.moe_utils:track_moe_metrics", f"{_MOE}.moe_logging:MoEMetricsTracker.report")
    return (
        Wrap(f"{_TRAINING}:training_log", f"{_REPORT}:mark_training_log", check_source=False),
        Wrap(
            "megatron.bridge.training.utils.train_utils:training_log",
            "megatron_overrides.frameworks.bridge:mark_training_log",
            check_source=False,
        ),
        Wrap(
            "swift.megatron.trainers.base:BaseMegatronTrainer._log_callback",
            "megatron_overrides.frameworks.ms_swift:mark_training_log",
            check_source=False,
        ),
        *(Wrap(division, f"megatron_overrides.moe.logged_losses:{override}") for division in divisions),
    )


# -- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZER = "megatron.core.optimizer.optimizer"

OPTIMIZER_STEP = (
    Override(f"{OPTIMIZER}:ChainedOptimizer.step", f"{_STEP}:step_chained"),
    Override(f"{OPTIMIZER}:MixedPrecisionOptimizer.step", f"{_STEP}:step_alone"),
    Override(f"{OPTIMIZER}:FP32Optimizer.step", f"{_STEP}:step_alone"),
    Override(f"{OPTIMIZER}:ChainedOptimizer.get_parameters", f"{_STEP}:get_parameters_of_chain", where="missing"),
    Override("megatron.core.models.mimo.optimizer:MimoOptimizer.step", "megatron_overrides.norms.mimo_optimizer:step"),
    Override(
        "megatron.core.models.mimo.optimizer:MimoOptimizer.get_grad_norm",
        "megatron_overrides.norms.mimo_optimizer:get_grad_norm",
    ),
)

_GRADIENTS = "megatron_overrides.norms.gradients"
_NORMS = "megatron_overrides.norms.measuring"
_BASE = f"{OPTIMIZER}:MegatronOptimizer"
_CHAIN = f"{OPTIMIZER}:ChainedOptimizer"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"


# For the `numerics` of each patch that brings the edits below and changes norms in no other way; also the `unasked` of
# one that is no repair.
ROUNDED_NORM = (
    "Where ranks share out experts without a distributed optimizer, and several optimizers have the dense parameters "
    "(Muon and Adam), the last digit of the gradient norm may change: the optimizers of a group have one sum."
)

# All norms of a step from one reduction.
GRAD_NORMS = (
    Override(f"{_BASE}._filter_grads_for_norm", f"{_GRADIENTS}:_filter_grads_for_norm", where="missing"),
    # In place of the newer one too, which does not know the groups of --grad-norm-group.
    Override(f"{_BASE}.get_grads_for_grad_norm", f"{_GRADIENTS}:get_grads_for_grad_norm", where="everywhere"),
    Override(f"{_BASE}.get_main_grads_for_grad_norm", f"{_GRADIENTS}:get_main_grads_for_grad_norm", where="everywhere"),
    *(Override(f"{owner}.get_grad_norm", f"{_NORMS}:get_grad_norm") for owner in (_BASE, _CHAIN, _LAYER_WISE)),
    *(
        Override(f"{owner}._compute_grad_norms_by_group", f"{_NORMS}:_compute_grad_norms_by_group", where="everywhere")
        for owner in (_BASE, _CHAIN)
    ),
    Override(f"{_BASE}.clip_grad_norm", f"{_STEP}:clip_grad_norm"),
)

# Shards and main copies keep the norm group of their parameter.
COPY_GRAD_NORM_TAGS = Wrap(
    "megatron.core.tensor_parallel.layers:copy_tensor_model_parallel_attributes",
    "megatron_overrides.norms.tags:copy_grad_norm_tags",
    check_source=False,
)

# -- the log ---------------------------------------------------------------------------------------------------------

SHOW_METRICS = (
    Wrap(f"{_TRAINING}:training_log", f"{_REPORT}:log_metrics", check_source=False),
    Wrap(f"{_TRAINING}:print_rank_last", f"{_REPORT}:append_to_log_line", check_source=False),
)
