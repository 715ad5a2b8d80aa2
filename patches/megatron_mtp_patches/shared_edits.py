"""Edits that several patches need, and the names of the targets they share. The engine installs each of them once."""

from .engine import Export, Replace, Wrap

# -- multi-token prediction -------------------------------------------------------------------------------------------

MTP = "megatron.core.transformer.multi_token_prediction"
MTP_OVERRIDES = "megatron_overrides.core.transformer.multi_token_prediction"
TRANSFORMER_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"

_LOSS = (f"{MTP}:process_mtp_loss", f"{MTP_OVERRIDES}.loss:process_mtp_loss")
MTP_LOSS = (
    Export(*_LOSS),
    Replace(*_LOSS),
    # 0.16 has the loss inside GPTModel, which must then call ours.
    Wrap(
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        "megatron_overrides.core.models.gpt.gpt_model:call_process_mtp_loss",
    ),
)

# The layer under the 1F1B overlap of experts: up to 0.18, and from 0.19 on.
SCHEDULED_MTP_LAYER = (
    "megatron.core.models.gpt.fine_grained_callables:build_mtp_layer_callables",
    "megatron.core.models.common.fine_grained_callables:build_mtp_layer_callables",
)

# -- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZER = "megatron.core.optimizer.optimizer"
OPTIMIZER_CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig"

OPTIMIZER_STEP = (
    Replace(f"{OPTIMIZER}:ChainedOptimizer.step", "megatron_overrides.core.optimizer.optimizer:step_chained"),
    Replace(f"{OPTIMIZER}:MixedPrecisionOptimizer.step", "megatron_overrides.core.optimizer.optimizer:step_alone"),
    Replace(f"{OPTIMIZER}:FP32Optimizer.step", "megatron_overrides.core.optimizer.optimizer:step_alone"),
    Export(
        f"{OPTIMIZER}:ChainedOptimizer.get_parameters",
        "megatron_overrides.core.optimizer.optimizer:get_parameters_of_chain",
    ),
    Replace(
        "megatron.core.models.mimo.optimizer:MimoOptimizer.step",
        "megatron_overrides.core.models.mimo.optimizer:step",
    ),
    Replace(
        "megatron.core.models.mimo.optimizer:MimoOptimizer.get_grad_norm",
        "megatron_overrides.core.models.mimo.optimizer:get_grad_norm",
    ),
)

# -- settings and the log ---------------------------------------------------------------------------------------------

CHECK_TRANSFORMER_CONFIG = Wrap(
    f"{TRANSFORMER_CONFIG}.__post_init__",
    "megatron_overrides.core.transformer.transformer_config:check_after_init",
    any_source=True,
)
CHECK_SETTINGS = (
    Wrap(
        f"{OPTIMIZER_CONFIG}.__post_init__",
        "megatron_overrides.core.optimizer.optimizer_config:check_after_init",
        any_source=True,
    ),
    Wrap(
        "megatron.training.arguments:validate_args",
        "megatron_overrides.training.arguments:check_arguments",
        any_source=True,
    ),
)
DEFAULT_IN_YAML = Wrap(
    "megatron.training.yaml_arguments:core_config_from_args",
    "megatron_overrides.training.yaml_arguments:default_added_fields",
    any_source=True,
)
SHOW_METRICS = (
    Wrap(
        "megatron.training.training:training_log",
        "megatron_overrides.training.training:log_metrics",
        any_source=True,
    ),
    Wrap(
        "megatron.training.training:print_rank_last",
        "megatron_overrides.training.training:append_to_log_line",
        any_source=True,
    ),
)


def add_or_replace(target: str, override: str) -> tuple[Export, Replace]:
    """For what only the newer releases have."""
    return Export(target, override), Replace(target, override)
