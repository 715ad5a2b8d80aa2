"""Train the MTP heads alone: `config.freeze_base_model_for_mtp`.

NVIDIA/Megatron-LM#7021 has the same setting; #4785 (`--freeze-base-for-mtp` of megatron.post_training, 0.19) lets the
same parameters train. The main model runs without gradients and keeps no activations. The heads are detached as by
`config.mtp_detach_heads`. Their loss is attached to the output of the model instead of the hidden states of the main
model, so the backward pass does not go through the output layer and the main loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _NormBase

from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.mtp.forward_pass import current


def freeze(model: torch.nn.Module) -> None:
    """Let only the parameters of the heads require gradients, and keep the main model's running statistics."""
    heads = {module for block in mtp_blocks([model]) for module in block.modules()}
    for module in model.modules():
        if module in heads:
            continue
        for param in module.parameters(recurse=False):
            param.requires_grad_(False)
        if isinstance(module, _NormBase):
            module.track_running_stats = False


@contextmanager
def gradients_of_heads() -> Iterator[None]:
    """Record gradients also inside `run_main_model_without_gradients`; for a `with` statement or as a decorator."""
    with torch.set_grad_enabled(current().trains_heads):
        yield


def attach_loss(main: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return `main`, the hidden states [s, b, h] of the main model, whose backward pass trains the heads by `loss`.

    Where the main model is frozen, the output of the model does so instead, and `main` is returned detached.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    losses = current().head_losses
    if losses is None:
        return MTPLossAutoScaler.apply(main, loss)
    losses.append(loss)
    return main.detach()
