"""The wrappers around weights of the heads that run several times in one pass: each backward pass adds its gradient.

NVIDIA/Megatron-LM#6965: the layer of repeated heads, and under Megatron-FSDP the output layer of attached heads.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.detached_heads import are_detached


def add_gradients_of_all_depths(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__.

    TransformerEngine overwrites a fused gradient in the backward of a call that has `is_first_microbatch=True`.
    Megatron passes that to the first depth, whose backward runs last, and None to every depth of a layer that has
    `disable_parameter_transpose_cache`: then it adds, and quantizes the weights in each call.
    """
    call.proceed()
    if is_repeated(call.instance.config):
        for module in call.instance.modules():
            if hasattr(module, "is_first_microbatch"):
                module.disable_parameter_transpose_cache = True


def add_gradients_under_fsdp(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__(config, ddp_config, module, ...) of Megatron-FSDP.

    It has each fused gradient overwrite the one before. What runs several times gets gradients that are not fused:
    autograd adds them up, and Megatron-FSDP takes the sum.
    """
    config = call["config"]
    for module in call["module"].modules():
        if getattr(module, "mtp_process", False) and not are_detached(config):
            _fuse_no_gradients(module.output_layer)
        if hasattr(module, "mtp_use_repeated_layer") and is_repeated(config):
            _fuse_no_gradients(module)
    call.proceed()


def is_repeated(config: Any) -> bool:
    """True if one MTP layer runs for several depths."""
    return bool(getattr(config, "mtp_use_repeated_layer", False) and (config.mtp_num_layers or 0) > 1)


def _fuse_no_gradients(module: torch.nn.Module) -> None:
    for child in module.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):  # Megatron's, TransformerEngine's
            if getattr(child, name, False):
                setattr(child, name, False)
