"""Refuse `--mtp-init` where no trained main model is loaded, or where its checkpoint cannot be read."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.checks import spell

STARTS = ("random", "last-layer")


def check_start(settings: Any) -> None:
    """Raise ValueError if `mtp_init`, of Megatron's arguments or of a model's configuration, is none of STARTS."""
    start = getattr(settings, "mtp_init", None)
    if start not in (None, *STARTS):
        raise ValueError(f"{spell('mtp_init')} must be one of {', '.join(STARTS)}, not {start!r}")


def check_new_heads(settings: Any) -> None:
    """Raise ValueError if Megatron's arguments ask for new heads that cannot be initialized."""
    start = getattr(settings, "mtp_init", None)
    if start is None:
        return
    check_start(settings)
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
