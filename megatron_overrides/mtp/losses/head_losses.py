"""The losses of the MTP heads and what is measured of them, from hidden states and settings alone.

NVIDIA/Megatron-LM#3456, #3458, #6473. No configuration, tracker or forward pass of Megatron is read here:
process_mtp_loss.py does that for Megatron's models, and `megatron_mtp_patches.functional.mtp_loss` for other trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel

from megatron_overrides.mtp.losses.chunked_heads import ChunkedHeads, HeadRows
from megatron_overrides.mtp.losses.head_settings import HeadSettings
from megatron_overrides.mtp.losses.main_model_rows import Roll, line_up
from megatron_overrides.mtp.losses.position_weights import dpace_weights
from megatron_overrides.mtp.losses.projection import Projection
from megatron_overrides.mtp.losses.token_counts import TokenCounts, sum_token_counts
from megatron_overrides.mtp.losses.vocabulary import most_likely_token
from megatron_overrides.mtp.metrics.head_metrics import HeadMetrics, accepted_lengths, by_label, mean_metrics


class Aligned(NamedTuple):
    """The positions of one head: labels [b, s] int64, mask [b, s] (1 where a position counts), and the mask's sum."""

    labels: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor


class TrainedLoss(NamedTuple):
    """A loss [b, s], masked and weighed, the number of positions that count, and the factor before their mean."""

    loss: torch.Tensor
    tokens: torch.Tensor
    factor: float

    def scaled(self) -> torch.Tensor:
        """Return [b, s], the loss times the factor."""
        return self.factor * self.loss

    def mean_parts(self, tokens: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return [b, s], scaled so that the sums of `ranks` ranks average to factor x the mean over all `tokens`."""
        return self.scaled() * ranks / tokens.clamp(min=1)


class HeadLosses(NamedTuple):
    """Those of one microbatch on this rank.

    Attributes:
        trained: a loss for each head, or a single one for e2e_tv.
        metrics: what is measured.
        counts: the positions that count, of the main model and of each trained loss.
    """

    trained: list[TrainedLoss]
    metrics: HeadMetrics
    counts: TokenCounts


class MTPLoss(NamedTuple):
    """The result of `megatron_mtp_patches.functional.mtp_loss`.

    Attributes:
        loss: scalar, the mean over the heads of their means, times the scaling factor. Its average over the
            context-parallel ranks has the means over the positions of all of them.
        metrics: sums over the positions of this rank.
    """

    loss: torch.Tensor
    metrics: HeadMetrics

    @classmethod
    def average(cls, losses: HeadLosses, cp_group: Any) -> MTPLoss:
        """Divide by the positions of all ranks of `cp_group`; None is this rank alone."""
        counts = sum_token_counts(losses.counts, cp_group)
        means = [
            trained.mean_parts(tokens, counts.ranks).sum()
            for trained, tokens in zip(losses.trained, counts.losses, strict=True)
        ]
        return cls(torch.stack(means).sum(), losses.metrics)

    def means(self, group: Any = None) -> dict[str, float]:
        """Return the means by name: `mtp_1 loss` and, if measured, `mtp_1 acceptance %`, `mtp acceptance length`, ...

        Args:
            group: a collective over its ranks, of all their positions; None is this rank alone.
        """
        return by_label(mean_metrics(self.metrics.sums(), group))


def head_losses(
    main: torch.Tensor,
    heads: Sequence[torch.Tensor],
    targets: torch.Tensor,
    mask: torch.Tensor,
    roll: Roll,
    projection: Projection,
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    settings: HeadSettings,
    scaling_factor: float,
    cp_group: Any = None,
    packed_seq_params: Any = None,
) -> HeadLosses:
    """Compute the losses of D heads.

    Args:
        main: [s, b, h], the hidden states of the main model, with which the heads are compared; no gradient goes there.
        heads: D times [s, b, h], the hidden states of each head.
        targets: [b, s] int64, the labels of the main model: label i is token i + 1.
        mask: [b, s], 1 where a position of the main model counts.
        roll: [..., s] to the next position of each sequence, and the sum.
        cross_entropy: (labels [b, s], logits [s, b, v]) -> loss [b, s]. It may overwrite the logits.
        scaling_factor: what the mean over the heads is multiplied by.
    """
    aligned = list(_align(targets, mask, len(heads), roll))
    chunks = ChunkedHeads(projection, cross_entropy, settings)
    main_model = None
    if settings.compares:
        with torch.no_grad():
            main_model = line_up(projection.whole(main.detach()), len(heads), roll, packed_seq_params, cp_group)
    labels = [positions.labels for positions in aligned]
    if settings.is_chunked:
        rows = chunks.run([projection.whole(head) for head in heads], labels, main_model)
    else:
        rows = _all_at_once(heads, labels, projection, cross_entropy, settings)
        if main_model is not None:
            with torch.no_grad():
                compared = chunks.compare([projection.whole(head) for head in heads], labels, main_model)
            rows = compared._replace(loss=rows.loss, token=rows.token)
    trained, logged = _combine(rows.loss, aligned, settings, scaling_factor)
    counts = TokenCounts(mask.sum(), [loss.tokens for loss in trained])
    return HeadLosses(trained, _metrics(rows, logged, aligned, settings), counts)


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
    for head, head_labels in zip(heads, labels, strict=True):
        logits = projection(head)
        if settings.counts_labels:
            # Before the loss: TransformerEngine's fused cross entropy overwrites the logits with their gradient.
            tokens.append(most_likely_token(logits.detach(), projection.vocabulary.group).transpose(0, 1))
        losses.append(cross_entropy(head_labels, logits))
    return HeadRows(loss=losses, token=tokens)


def _combine(
    losses: Sequence[torch.Tensor], aligned: Sequence[Aligned], settings: HeadSettings, factor: float
) -> tuple[list[TrainedLoss], list[TrainedLoss]]:
    """Return what is trained and what is logged, which has one entry for each depth."""
    weights = settings.depth_weights
    if not settings.is_end_to_end:
        logged = [
            TrainedLoss(positions.mask * loss, positions.tokens, factor * weight / len(weights))
            for loss, positions, weight in zip(losses, aligned, weights, strict=True)
        ]
        if settings.dpace_alpha is None:
            return logged, logged
        dpace = dpace_weights(losses, [positions.mask != 0 for positions in aligned], settings.dpace_alpha)
        return [each._replace(loss=row * each.loss) for each, row in zip(logged, dpace, strict=True)], logged
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
        lengths = accepted_lengths(rows.acceptance, rows.agrees, _chains(aligned))
    sums = torch.stack([each.loss.detach().sum() for each in logged])
    return HeadMetrics(sums, torch.stack([each.tokens for each in logged]), counts, lengths)


def vocab_parallel_cross_entropy(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return Megatron's loss [b, s] for labels [b, s] and logits [s, b, v] of this rank's part of the vocabulary."""
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
    return loss.transpose(0, 1).contiguous()
