"""The wrappers that keep MTP heads in a model that trains without them: `config.disable_mtp_loss`.

NVIDIA/Megatron-LM#7384 (closed) had the setting. `compute_mtp_loss` of HybridModel.forward, in a newer Megatron, skips
the heads of one call and leaves their gradients and their optimizer state in place.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.mtp.forward_pass import current
from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled
from megatron_overrides.mtp.heads.detached_heads import report_zero_gradient
from megatron_overrides.mtp.losses.flops import without_heads


def disable_new_heads(call: Call) -> None:
    """Wraps MultiTokenPredictionBlock.__init__.

    From 0.18 on, gradient buffers are laid out from the parameters that require gradients before DDP sees the model.
    """
    call.proceed()
    if are_heads_disabled(call.instance.config):
        call.instance.requires_grad_(False)


def disable_wrapped_heads(call: Call) -> None:
    """Wraps the __init__(config, ddp_config, module, ...) of DDP, Megatron-FSDP and FSDP2.

    Heads may have got adapters (LoRA) since they were made.
    """
    if are_heads_disabled(call["config"]):
        for block in mtp_blocks([call["module"]]):
            block.requires_grad_(False)
    call.proceed()


def skip_disabled_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: in training it returns the hidden states of the main model alone.

    On a later pipeline stage the block's copy of the embedding gets the gradient of the first stage added to its own,
    and has none. Weights that Megatron-FSDP has gathered for the block beforehand are released after the backward pass.

    Raises:
        NotImplementedError: another library runs the heads, as verl does, and expects their hidden states.
    """
    if not (torch.is_grad_enabled() and are_heads_disabled(call.instance.config)):
        return call.proceed()
    if not current().is_recorded:
        raise NotImplementedError(
            "disable_mtp_loss cannot skip the heads of this model: another library has replaced the method of its "
            "class that runs them (GPTModel._postprocess; verl does). Turn them off by that library's "
            "own setting as well (mtp.enable_train=false of verl), or leave disable_mtp_loss out"
        )
    embedding = call["embedding"]
    is_copy = any(getattr(param, "shared", False) for param in getattr(embedding, "parameters", tuple)())
    return report_zero_gradient(call["hidden_states"], embedding) if is_copy else call["hidden_states"]


def count_no_heads(call: Call) -> Any:
    """Wraps num_floating_point_operations(args, batch_size, ...)."""
    if are_heads_disabled(call["args"]):
        call["args"] = without_heads(call["args"])
    return call.proceed()


def update_routers_of_main_model(call: Call) -> None:
    """Wraps _update_router_qb_beta(model, config, ...), which moves routers that have routed nothing towards zero.

    _update_router_expert_bias leaves these as they are.
    """
    if are_heads_disabled(call["config"]):
        heads = {module for block in mtp_blocks(call["model"]) for module in block.modules()}
        modules = (module for chunk in call["model"] for module in chunk.modules())
        call["model"] = [module for module in modules if hasattr(module, "qb_beta") and module not in heads]
    call.proceed()
