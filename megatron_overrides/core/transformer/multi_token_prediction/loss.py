"""The loss of the MTP heads: one function for all releases.

NVIDIA/Megatron-LM#3457 (labels from the tokens), #3458 (acceptance counts), #3456 (detached output weight), #6473
(total variation). Upstream computes this loss inside GPTModel in 0.16.1 and in `process_mtp_loss` from 0.17 on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.utils import log_single_rank

from megatron_overrides.core.transformer.multi_token_prediction import forward_pass, head_metrics
from megatron_overrides.core.transformer.multi_token_prediction.acceptance import most_likely_token
from megatron_overrides.core.transformer.multi_token_prediction.chunked_heads import ChunkedHeads, HeadRows
from megatron_overrides.core.transformer.multi_token_prediction.frozen_main_model import (
    attach_loss,
    with_gradients_of_heads,
)
from megatron_overrides.core.transformer.multi_token_prediction.head_metrics import HeadMetrics
from megatron_overrides.core.transformer.multi_token_prediction.head_settings import HeadSettings
from megatron_overrides.core.transformer.multi_token_prediction.main_model_rows import Roll, line_up
from megatron_overrides.core.transformer.multi_token_prediction.projection import Projection

logger = logging.getLogger(__name__)


class Aligned(NamedTuple):
    """The positions of one head: labels [b, s] int64, mask [b, s] (1 where a position counts), and the mask's sum."""

    labels: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor


class TrainedLoss(NamedTuple):
    """A loss [b, s] with the mask applied, the number of positions that count, and the factor before their mean."""

    loss: torch.Tensor
    tokens: torch.Tensor
    factor: float


@with_gradients_of_heads
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
        rescale_per_token: with `config.calculate_per_token_loss`, weigh a head's tokens as the main model's are weighed
            (from 0.17 on) or not at all (0.16.1).

    Returns:
        The hidden states of the main model, [s, b, h]; backward through them trains the heads too.
    """
    model_pass = forward_pass.current()
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
        # Label i is token i + 1. The last position of a sequence has no label; the mask leaves it out.
        (targets, _), (mask, _) = roll(targets), roll(mask)
    aligned = list(_align(targets, mask, len(heads), roll))

    projection = Projection.of(output_layer, output_weight, runtime_gather_output, scale_logits_fn, tp_group, config)
    settings = HeadSettings.of(config, is_training, model_pass)
    chunks = ChunkedHeads(projection, compute_language_model_loss, settings)
    main_model = None
    if settings.compares:
        with torch.no_grad():
            main_model = line_up(projection.whole(main.detach()), len(heads), roll, packed_seq_params, cp_group)
    labels_of_heads = [positions.labels for positions in aligned]
    if settings.is_chunked:
        rows = chunks.run([projection.whole(head) for head in heads], labels_of_heads, main_model)
    else:
        rows = _all_at_once(heads, labels_of_heads, projection, compute_language_model_loss, settings)
        if main_model is not None:
            with torch.no_grad():
                compared = chunks.compare([projection.whole(head) for head in heads], labels_of_heads, main_model)
            rows = compared._replace(loss=rows.loss, token=rows.token)

    trained, logged = _combine(rows.loss, aligned, settings, config.mtp_loss_scaling_factor)
    if model_pass.metrics is not None or is_training:
        save = head_metrics.save_to_tracker if model_pass.metrics is None else model_pass.metrics.add
        save(_metrics(rows, logged, aligned, settings))
    main_tokens = mask.sum()
    for loss, tokens, factor in trained:
        safe_tokens = tokens.clamp(min=1)
        loss = factor * loss
        if not config.calculate_per_token_loss:
            loss = loss / safe_tokens
        elif rescale_per_token:
            # finalize_model_grads divides by the tokens of the main model; a head predicts fewer.
            loss = loss * (main_tokens / safe_tokens)
        main = attach_loss(main, loss)
    return main


def _align(targets: torch.Tensor, mask: torch.Tensor, depths: int, roll: Roll) -> Iterator[Aligned]:
    """Shift labels and mask by one position for each depth."""
    for _ in range(depths):
        (targets, _), (mask, tokens) = roll(targets), roll(mask)
        yield Aligned(targets, mask, tokens)


def _all_at_once(
    heads: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    projection: Projection,
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    settings: HeadSettings,
) -> HeadRows:
    """Compute the cross entropy of heads from the logits of all their positions, as Megatron does."""
    losses, tokens = [], []
    for head, of_head in zip(heads, labels, strict=True):
        logits = projection(head)
        if settings.counts_labels:
            # Before the loss: TransformerEngine's fused cross entropy overwrites the logits with their gradient.
            tokens.append(most_likely_token(logits.detach(), projection.vocabulary.group).transpose(0, 1))
        losses.append(cross_entropy(of_head, logits))
    return HeadRows(loss=losses, token=tokens)


def _combine(
    losses: Sequence[torch.Tensor], aligned: Sequence[Aligned], settings: HeadSettings, factor: float
) -> tuple[list[TrainedLoss], list[TrainedLoss]]:
    """Return what is trained and what is logged, which has one entry for each depth."""
    weights = settings.depth_weights
    if not settings.is_end_to_end:
        trained = [
            TrainedLoss(positions.mask * loss, positions.tokens, factor * weight / len(weights))
            for loss, positions, weight in zip(losses, aligned, weights, strict=True)
        ]
        return trained, trained
    # Bebop (arXiv 2606.12370), equation 13: the mean length of the accepted prefix, of which each head is a factor.
    chains = _chains(aligned)
    prefixes = (1 - torch.stack(list(losses))).cumprod(dim=0)
    weighed = prefixes * prefixes.new_tensor(weights).view(-1, 1, 1)
    trained = [TrainedLoss(chains * (1 - weighed.mean(dim=0)), chains.sum(), factor)]
    return trained, [TrainedLoss(chains * (1 - prefix), chains.sum(), factor) for prefix in prefixes]


def _chains(aligned: Sequence[Aligned]) -> torch.Tensor:
    """Return [b, s] bool, the positions that count for all heads."""
    return torch.stack([positions.mask != 0 for positions in aligned]).all(dim=0)


def _metrics(
    rows: HeadRows, logged: Sequence[TrainedLoss], aligned: Sequence[Aligned], settings: HeadSettings
) -> HeadMetrics:
    counts = lengths = None
    if settings.counts_labels:
        correct = [
            ((token == positions.labels) & (positions.mask != 0)).sum()
            for token, positions in zip(rows.token, aligned, strict=True)
        ]
        counts = torch.stack([torch.stack(correct), torch.stack([(each.mask != 0).sum() for each in aligned])])
    if settings.measures_lengths:
        lengths = head_metrics.accepted_lengths(rows.acceptance, rows.agrees, _chains(aligned))
    sums = torch.stack([each.loss.detach().sum() for each in logged])
    return HeadMetrics(sums, torch.stack([each.tokens for each in logged]), counts, lengths)


@functools.cache
def _warn_of_missing_mask() -> None:
    """Say once that heads train on padding; a data set masks it, and so does an RL trainer that gives no labels."""
    text = "The model gets labels and no loss_mask, so the MTP heads train on every position, padding included"
    log_single_rank(logger, logging.WARNING, text)


def _count_everything(targets: torch.Tensor, packed_seq_params: Any, cp_group: Any) -> torch.Tensor:
    """Return a loss mask of ones; padding counts too unless roll-padded-packed-sequences is applied."""
    if hasattr(mtp, "ones_without_padding"):
        return mtp.ones_without_padding(targets, packed_seq_params, cp_group)
    return torch.ones_like(targets)
