"""Train the MTP heads alone: `config.freeze_base_model_for_mtp`.

NVIDIA/Megatron-LM#7021 has the same setting; #4785 (`--freeze-base-for-mtp` of megatron.post_training, 0.19) lets the
same parameters train. The main model runs without gradients and keeps no activations. The heads are detached as by
`config.mtp_detach_heads`. Their loss is attached to the output of the model instead of the hidden states of the main
model, so the backward pass does not go through the output layer and the main loss. The wrappers freeze new models, send
gradients of zero back through the pipeline, and leave the main model out of what a step updates and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from megatron_overrides.call import Call
from megatron_overrides.mtp.blocks import mtp_blocks
from megatron_overrides.mtp.forward_pass import current, running_pass
from megatron_overrides.mtp.frozen.checks import check_heads_to_train
from megatron_overrides.mtp.frozen.trained_parts import is_main_model_frozen
from megatron_overrides.mtp.losses.flops import tokens_in_batch, without_heads


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


def _zero_where_missing(gradient: torch.Tensor | None, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return torch.zeros_like(tensor) if gradient is None and tensor is not None else gradient


def return_zero_gradient(call: Call) -> Any:
    """Wraps backward_step(input_tensor, ..., config): the previous pipeline stage waits for a gradient of its output.

    A frozen main model gives none, so the schedule sends a gradient of zero.
    """
    gradients = call.proceed()
    if not is_main_model_frozen(call["config"]):
        return gradients
    inputs = call["input_tensor"]
    if not isinstance(inputs, list):
        return _zero_where_missing(gradients, inputs)
    return [_zero_where_missing(gradient, tensor) for gradient, tensor in zip(gradients, inputs, strict=True)]


def count_no_backward_of_main_model(call: Call) -> Any:
    """Wraps num_floating_point_operations(args, batch_size, ...): a frozen main model has a forward pass only.

    Megatron counts three times the forward pass for everything. A head trains through the output layer without a
    gradient of its weight.
    """
    flops = call.proceed()
    settings = call["args"]
    if not is_main_model_frozen(settings):
        return flops
    call["args"] = without_heads(settings)
    main_model_flops = call.proceed()
    head_flops = flops - main_model_flops
    if head_flops:  # Megatron 0.16 counts none in a hybrid model
        weight_gradients = 2 * tokens_in_batch(call) * settings.hidden_size * settings.padded_vocab_size
        head_flops -= settings.mtp_num_layers * weight_gradients
    return main_model_flops / 3 + head_flops


def freeze_new_model(call: Call) -> None:
    """Wraps the __init__ of GPTModel, HybridModel and MambaModel.

    From 0.18 on, gradient buffers are laid out from the parameters that require gradients before DDP sees the model.

    Raises:
        ValueError: the class has no MTP heads, as MambaModel of 0.16.
    """
    call.proceed()
    if is_main_model_frozen(call.instance.config):
        if not hasattr(call.instance, "mtp_process"):
            raise ValueError(
                f"--freeze-base-model-for-mtp trains only the MTP heads, and {type(call.instance).__name__} of this "
                f"Megatron has none: use a newer megatron-core, or leave the flag out"
            )
        freeze(call.instance)


def run_main_model_without_gradients(call: Call) -> torch.Tensor:
    """Wraps the forward of GPTModel, HybridModel and MambaModel.

    A last stage without heads (`mtp_standalone`) gets their hidden states as its input. It passes them on through a
    decoder without layers, and the loss of the heads sends a gradient back.
    """
    if not is_main_model_frozen(call.instance.config) or not torch.is_grad_enabled():
        return call.proceed()
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    losses: list[torch.Tensor] = []
    has_gradients = call.instance.post_process and not call.instance.mtp_process
    with running_pass(head_losses=losses), torch.set_grad_enabled(has_gradients):
        output = call.proceed()
    for loss in losses:
        output = MTPLossAutoScaler.apply(output, loss)
    return output


def run_heads_with_gradients(call: Call) -> Any:
    """Wraps MultiTokenPredictionBlock.forward, which is called inside `run_main_model_without_gradients`."""
    if current().head_losses is None:
        return call.proceed()
    # A stage without layers of the main model passes on what it has received, which requires a gradient.
    call["hidden_states"] = call["hidden_states"].detach()
    with gradients_of_heads():
        return call.proceed()


def freeze_what_is_wrapped(call: Call) -> None:
    """Wraps the __init__(config, ddp_config, module, ...) of DDP, Megatron-FSDP and FSDP2.

    A GPTModel is frozen already; what has one as a part of it is not.

    Raises:
        ValueError: the settings of the frozen model cannot work; a trainer without argparse learns of it here.
    """
    if is_main_model_frozen(call["config"]):
        check_heads_to_train(call["config"])
        freeze(call["module"])
    call.proceed()


def update_routers_of_heads(call: Call) -> None:
    """Wraps _update_router_expert_bias and _update_router_qb_beta(model, config, ...), which walk the model chunks.

    The bias of a router in the frozen main model is part of it. The quantile balancing of 0.19 would move it towards
    zero, since routers collect no quantiles without gradients.
    """
    if is_main_model_frozen(call["config"]):
        call["model"] = list(mtp_blocks(call["model"]))
    call.proceed()
