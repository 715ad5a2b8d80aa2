"""The wrappers around the forward pass of a model with MTP heads."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.forward_pass import (
    ForwardPass,
    current,
    megatron_fsdp_releases,
    modelopt_observes,
    running_pass,
)
from megatron_overrides.mtp.frozen.frozen_main_model import is_training_heads
from megatron_overrides.mtp.mtp_pass import requested


def record_forward_inputs(call: Call) -> Any:
    """Wraps GPTModel._postprocess, HybridModel.forward and MambaModel.forward: records the pass as current().

    Without gradients (evaluation, log probabilities of an RL policy) the heads are of no use, unless modelopt observes
    them or an `mtp_pass` asks for them. The block can be skipped if it runs in the same call as the loss; otherwise the
    next pipeline stage expects its output. It runs, without its loss, where Megatron-FSDP releases its weights.
    """
    runs_block = getattr(call.instance, "mtp_process", False) and call.get("mtp_in_postprocess", True)
    request = requested()
    is_training = torch.is_grad_enabled() or is_training_heads()
    if request is None:
        computes_loss = is_training or bool(runs_block and modelopt_observes(call.instance.mtp))
        metrics = None
    else:
        computes_loss = request.compute
        metrics = request.metrics if computes_loss and not is_training else None
    given = (None, None) if request is None else (request.labels, request.loss_mask)
    can_skip = call.instance.post_process and runs_block and not computes_loss
    is_idle = bool(can_skip and not megatron_fsdp_releases(call.instance.mtp))
    groups = getattr(call.instance, "pg_collection", None)
    with running_pass(ForwardPass(call.get("input_ids"), computes_loss, is_idle, metrics, *given, groups)):
        return call.proceed()


def skip_idle_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: skips the block where the forward pass is idle."""
    if current().is_idle:
        return call["hidden_states"]
    return call.proceed()
