"""The loss of the MTP heads in Megatron's models: one function for all releases.

NVIDIA/Megatron-LM#3457 (labels from the tokens); head_losses.py computes the losses. Upstream computes them inside
GPTModel in 0.16.1 and in `process_mtp_loss` from 0.17 on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.model_ranks import warn_on_last_rank
from megatron_overrides.mtp.forward_pass import recorded_pass
from megatron_overrides.mtp.frozen.frozen_main_model import attach_loss, gradients_of_heads
from megatron_overrides.mtp.heads.detached_heads import are_detached
from megatron_overrides.mtp.loss_weight.current import loss_weight
from megatron_overrides.mtp.losses.head_losses import head_losses
from megatron_overrides.mtp.losses.head_settings import HeadSettings
from megatron_overrides.mtp.losses.projection import Projection
from megatron_overrides.mtp.losses.vocabulary import number_of_tokens
from megatron_overrides.mtp.metrics import head_metrics

logger = logging.getLogger(__name__)


@gradients_of_heads()
def process_mtp_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    output_layer: Callable[..., Any],
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[..., Any],
    config: Any,
    *,
    cp_group: Any = None,
    tp_group: Any = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    input_ids: torch.Tensor | None = None,
    rescale_per_token: bool = True,
) -> torch.Tensor:
    """Attach the losses of all MTP heads to the hidden states of the main model.

    Args:
        hidden_states: [(1 + D) s, b, h], those of the main model followed by those of D = `config.mtp_num_layers`
            heads.
        labels: [b, s] int64; None (RL) derives them from `input_ids`.
        loss_mask: [b, s], 1 where a position counts; aligned with `labels`, or with `input_ids` if the labels are
            derived from them. None counts every position, or every token where roll-padded-packed-sequences is
            applied.
        output_layer: called (hidden [s, b, h], weight=, runtime_gather_output=), returns (logits [s, b, v], bias).
        output_weight: the tied embedding, or None if the output layer has its own weight.
        is_training: whether to log the losses and the acceptance of a pass with gradients.
        compute_language_model_loss: (labels [b, s], logits [s, b, v]) -> loss [b, s]. It may overwrite the logits.
        input_ids: [b, s] int64, the tokens that the main model has seen.
        rescale_per_token: with `config.calculate_per_token_loss`, weight a head's tokens as the main model's are
            weighted (from 0.17 on) or not at all (0.16.1).

    Returns:
        The hidden states of the main model, [s, b, h]; backward through them trains the heads too.
    """
    model_pass = recorded_pass()
    if model_pass.is_idle:
        return hidden_states
    labels, loss_mask = model_pass.targets(labels, loss_mask)
    main, *heads = torch.chunk(hidden_states, 1 + config.mtp_num_layers, dim=0)
    input_ids = model_pass.input_ids if input_ids is None else input_ids
    if not model_pass.computes_loss or (labels is None and input_ids is None):
        return main

    def roll(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mtp.roll_tensor(tensor, shifts=-1, dims=-1, cp_group=cp_group, packed_seq_params=packed_seq_params)

    targets, mask = (input_ids if labels is None else labels), loss_mask
    if mask is None:
        if labels is not None and is_training:
            _warn_of_missing_mask()
        mask = _count_everything(targets, packed_seq_params, cp_group)
    if labels is None:
        if torch.is_grad_enabled() and not are_detached(config):
            _warn_of_derived_labels()
        # Label i is token i + 1. The last position of a sequence has no label; the mask leaves it out.
        (targets, _), (mask, _) = roll(targets), roll(mask)
    projection = Projection.create(
        output_layer,
        output_weight,
        runtime_gather_output,
        scale=scale_logits_fn,
        tp_group=tp_group,
        is_detached=are_detached(config),
        vocab_size=number_of_tokens(config),
        is_sequence_parallel=getattr(config, "sequence_parallel", False),
    )
    losses = head_losses(
        main,
        heads,
        targets,
        mask,
        roll,
        projection,
        cross_entropy=compute_language_model_loss,
        settings=HeadSettings.read(config, is_training, model_pass),
        scaling_factor=loss_weight(config, model_pass.trains_heads),
        cp_group=cp_group,
        packed_seq_params=packed_seq_params,
    )
    logs = is_training and model_pass.metrics is None
    counts = losses.counts
    if hasattr(mtp, "sum_token_counts") and (logs or torch.is_grad_enabled()):
        counts = mtp.sum_token_counts(counts, cp_group)
    if logs:
        head_metrics.save_to_tracker(losses.metrics, counts)
    elif model_pass.metrics is not None:
        model_pass.metrics.add(losses.metrics)
    for trained, tokens in zip(losses.trained, counts.losses, strict=True):
        if not config.calculate_per_token_loss:
            loss = trained.mean_parts(tokens, counts.ranks)
        elif rescale_per_token:
            # finalize_model_grads divides by the tokens of the main model; a head predicts fewer.
            loss = trained.scaled() * (counts.main / tokens.clamp(min=1))
        else:
            loss = trained.scaled()
        main = attach_loss(main, loss)
    return main


@functools.cache
def _warn_of_missing_mask() -> None:
    """Warn once that heads train on padding; a data set masks it, and so does an RL trainer that gives no labels."""
    text = "The model gets labels and no loss_mask, so the MTP heads train on every position, padding included"
    warn_on_last_rank(logger, text)


@functools.cache
def _warn_of_derived_labels() -> None:
    """Warn once that a loss that the trainer did not ask for trains its model: an RL policy, for example."""
    text = (
        "The model gets no labels, so the MTP heads derive theirs from the tokens, and their loss trains the main "
        "model as well. --mtp-detach-heads (config.mtp_detach_heads) keeps it in the heads"
    )
    warn_on_last_rank(logger, text)


def _count_everything(targets: torch.Tensor, packed_seq_params: Any, cp_group: Any) -> torch.Tensor:
    """Return a loss mask of ones; padding counts too unless roll-padded-packed-sequences is applied."""
    if hasattr(mtp, "ones_without_padding"):
        return mtp.ones_without_padding(targets, packed_seq_params, cp_group)
    return torch.ones_like(targets)
