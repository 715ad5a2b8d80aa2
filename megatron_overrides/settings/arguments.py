"""Checks of Megatron's arguments, before a model is built."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.mtp.new_heads.initialization import STARTS
from megatron_overrides.settings.model_settings import (
    check_frozen_main_model,
    check_heads,
    check_token_counts,
)
from megatron_overrides.settings.optimizer_settings import check_separate_clip, check_settings

logger = logging.getLogger(__name__)


def check_arguments(call: Call) -> Any:
    """Wraps validate_args(args, defaults)."""
    settings = call["args"]
    check_settings(settings)
    check_heads(settings)
    check_separate_clip(settings)
    _check_new_heads(settings)
    validated = call.proceed()
    # Now it has read the heads of a hybrid model's pattern; only a checkpoint may still add some.
    check_frozen_main_model(settings, is_complete=not getattr(settings, "use_checkpoint_args", False))
    check_token_counts(settings)
    return validated


def _check_new_heads(settings: Any) -> None:
    start = getattr(settings, "mtp_init", None)
    if start is None:
        return
    if start not in STARTS:
        raise ValueError(f"--mtp-init must be one of {', '.join(STARTS)}, not {start!r}")
    if not (settings.load or getattr(settings, "pretrained_checkpoint", None)):
        raise ValueError("--mtp-init starts from a trained model: add --load or --pretrained-checkpoint")
    for name, why in (
        ("use_megatron_fsdp", "its checkpoints have another format"),
        ("use_torch_fsdp2", "its checkpoints have another format"),
        ("non_persistent_ckpt_type", "such a checkpoint can be newer than the one that is looked at"),
        ("moe_use_upcycling", "it loads a model of another kind"),
        ("load_main_params_from_ckpt", "the checkpoint has no main params of the heads"),
    ):
        if getattr(settings, name, None):
            raise ValueError(f"--mtp-init cannot be combined with --{name.replace('_', '-')}: {why}. Leave one out")
    if not getattr(settings, "perform_initialization", True):
        raise ValueError("--mtp-init needs initialized parameters: leave out --no-initialization")


def enforce_megatron_fsdp_args(call: Call) -> Any:
    """Wraps validate_args(args, defaults): what Megatron-FSDP needs of the optimizer, as NVIDIA/Megatron-LM#4133."""
    settings = call["args"]
    if getattr(settings, "use_megatron_fsdp", False) and getattr(settings, "megatron_fsdp_version", 1) == 1:
        if settings.optimizer not in ("adam", "sgd"):
            raise ValueError(
                f"--use-megatron-fsdp cannot shard the state of --optimizer {settings.optimizer}: choose adam or sgd, "
                f"or leave --use-megatron-fsdp out"
            )
        if not settings.use_distributed_optimizer:
            log_single_rank(logger, logging.WARNING, "--use-megatron-fsdp sets --use-distributed-optimizer")
        if getattr(settings, "reuse_grad_buf_for_mxfp8_param_ag", False):
            log_single_rank(logger, logging.WARNING, "--use-megatron-fsdp unsets --reuse-grad-buf-for-mxfp8-param-ag")
        settings.use_distributed_optimizer = True
        settings.reuse_grad_buf_for_mxfp8_param_ag = False  # a buffer that Megatron-FSDP does not have
    return call.proceed()
