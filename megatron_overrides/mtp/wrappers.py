"""The wrappers around the forward pass of a model with MTP heads."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.forward_pass import (
    current,
    megatron_fsdp_releases,
    modelopt_observes,
    mtp_pass_request,
    recorded_pass,
    running_pass,
)
from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled


def record_forward_inputs(call: Call) -> Any:
    """Wraps GPTModel._postprocess, HybridModel.forward and MambaModel.forward: records the pass.

    Without gradients (evaluation, log probabilities of an RL policy) the heads are not needed, unless modelopt observes
    them or an `mtp_pass` asks for them. The block can be skipped if it runs in the same call as the loss; otherwise the
    next pipeline stage expects its output. It runs, without its loss, where Megatron-FSDP releases its weights.

    Disabled heads have no loss in training, whatever an `mtp_pass` asks for, and every stage knows it.
    """
    runs_block = getattr(call.instance, "mtp_process", False) and call.get("mtp_in_postprocess", True)
    request = mtp_pass_request.get()
    trains_heads = current().trains_heads
    is_disabled = trains_heads and are_heads_disabled(call.instance.config)
    if is_disabled:
        computes_loss = False
    elif request is None:
        computes_loss = trains_heads or bool(runs_block and modelopt_observes(call.instance.mtp))
    else:
        computes_loss = request.compute
    can_skip = call.instance.post_process and runs_block and not computes_loss
    with running_pass(
        is_recorded=True,
        input_ids=call.get("input_ids"),
        computes_loss=computes_loss,
        is_idle=is_disabled or bool(can_skip and not megatron_fsdp_releases(call.instance.mtp)),
        request=request,
        metrics=request.metrics if request is not None and computes_loss and not trains_heads else None,
    ):
        return call.proceed()


def skip_idle_block(call: Call) -> torch.Tensor:
    """Wraps MultiTokenPredictionBlock.forward: skips the block where the forward pass is idle."""
    if recorded_pass().is_idle:
        return call["hidden_states"]
    return call.proceed()
