"""Train the MTP heads of mcore-bridge's GPTModel by the losses of Megatron's models; refuse what does nothing there.

mcore-bridge has its own MTP layer, runs it only with labels, and computes the loss of the heads inside its GPTModel.
Its hybrid models are Megatron's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.mtp.forward_pass import current, running_pass
from megatron_overrides.mtp.frozen.frozen_main_model import gradients_of_heads
from megatron_overrides.mtp.heads.detached_heads import TAKES_MAIN_HIDDEN_STATES, are_detached
from megatron_overrides.settings.checks import declared_settings, spell

IGNORED = -100  # the label of a position that does not count


def refuse_settings(call: Call) -> None:
    """Wraps GPTModel.__init__(config, ...).

    Raises:
        ValueError: a setting acts in Megatron's own trainer or validation alone, so it has no effect here.
    """
    config = call["config"]
    for declared in declared_settings(type(config)) if getattr(config, "mtp_num_layers", None) else ():
        value = getattr(config, declared.name)
        if not declared.in_ms_swift and value not in (declared.default, None):
            raise ValueError(
                f"{spell(declared.name)} {value} has no effect under mcore-bridge, whose trainers do not know it: "
                f"leave it out"
            )
    call.proceed()


def train_heads(call: Call) -> Any:
    """Wraps GPTModel._postprocess: the heads run, and their losses are attached; the rest is as without heads.

    Without labels mcore-bridge runs no head; here they run if an `mtp_pass` asks for it.
    """
    model = call.instance
    has_heads = model.post_process and getattr(model, "mtp_process", False)
    has_targets = call["labels"] is not None or current().request is not None
    if not has_heads or not has_targets or model.config.task_type != "causal_lm":
        return call.proceed()
    if not current().is_idle:
        call["hidden_states"] = _attach_losses(call)
    without_heads = copy.copy(model)
    without_heads.mtp_process = False
    return call.proceed(without_heads)


def _attach_losses(call: Call) -> torch.Tensor:
    """Return the hidden states of the main model, [s, b, h]; backward through them trains the heads too."""
    from megatron_overrides.mtp.losses.process_mtp_loss import process_mtp_loss

    model, hidden_states = call.instance, call["hidden_states"]
    labels, mask = call["labels"], call["loss_mask"]
    passed_on = (
        "input_ids position_ids attention_mask inference_params rotary_pos_emb rotary_pos_cos rotary_pos_sin "
        "packed_seq_params sequence_len_offset"
    )
    with gradients_of_heads():
        hidden_states = model.mtp(
            **{name: call[name] for name in passed_on.split()},
            hidden_states=hidden_states if current().head_losses is None else hidden_states.detach(),
            embedding=model.embedding,
            decoder_input=call["decoder_input"] if model.config.is_multimodal else None,
            **(call["extra_block_kwargs"] or {}),
        )
    labels, mask = current().targets(labels, mask)
    if labels is not None:
        is_counted = labels != IGNORED
        mask = (is_counted if mask is None else is_counted & mask.bool()).float()
        labels = labels.masked_fill(~is_counted, 0)
    config = copy.copy(model.config)
    config.mtp_num_layers = config.mtp_unroll_steps  # a shared head counts once in mcore-bridge
    with running_pass(request=None):  # its labels and mask, which would replace these, are in them already
        return process_mtp_loss(
            hidden_states,
            labels,
            mask,
            model.output_layer,
            model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None,
            call["runtime_gather_output"],
            model.training,
            model.compute_language_model_loss,
            config,
            cp_group=model.cp_group,
            tp_group=model.pg_collection.tp,
            packed_seq_params=call["packed_seq_params"],
            scale_logits_fn=_scale_of_logits(model),
        )


class _NoProjection(torch.nn.Module):
    """Stands for an output layer where its logits are there already."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits, None


def _scale_of_logits(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that a class of models applies to its logits (Gemma 4 and Muse Glimmer cap them), or None."""
    from mcore_bridge.model.gpt_model import GPTModel

    if type(model)._forward_output_layer is GPTModel._forward_output_layer:
        return None
    projected = copy.copy(model)
    projected._modules = {**model._modules, "output_layer": _NoProjection()}
    return projected._forward_output_layer


def mark_first_head(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer.forward(..., layer_number=None): the input of head 1 comes from the main model.

    Shared weights make one layer serve as all heads, so the number of the call counts.
    """
    number = call.get("layer_number")
    if are_detached(call.instance.config) and (call.instance.layer_number if number is None else number) == 1:
        setattr(call.instance, TAKES_MAIN_HIDDEN_STATES, True)
    return call.proceed()
