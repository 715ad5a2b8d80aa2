"""Losses of the MTP heads and comparisons with the main model, without the logits of all positions at once.

The rows go through the output layer in chunks: those of the main model once, and those of each head. Of each row a few
numbers are kept and, for the backward pass, no more than a hidden state:

* Detached heads need the gradient of the hidden states alone. It is formed while the logits are there, one head after
  the other, and backward only scales it row by row. The loss scale is not known by then, so each row has a scale
  that keeps the gradient of KL from vanishing in float16.
* Attached heads also train the output layer, so backward computes the chunk again (torch.utils.checkpoint): one head
  after the other or, compared with the main model, all together, because its logits are computed once for all of them.

vocabulary.py adds up tensor-parallel shards of the vocabulary; projection.py gathers sequence-parallel rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from megatron_overrides.mtp.losses.divergences import OBJECTIVES, Divergence
from megatron_overrides.mtp.losses.head_settings import HeadSettings
from megatron_overrides.mtp.losses.main_model_rows import MainModelRows
from megatron_overrides.mtp.losses.projection import Projection
from megatron_overrides.mtp.losses.vocabulary import most_likely_token


class HeadRows(NamedTuple):
    """The heads' predictions at each position, [D, b, s] or D times [b, s] each; None if not asked for.

    Attributes:
        loss: the loss of each head, with a gradient: its cross entropy or its divergence from the main model.
        acceptance: the probability that rejection sampling accepts the head's token.
        agrees: whether the most likely tokens of head and main model are the same.
        token: int64, the most likely token of the head.
    """

    loss: Any = None
    acceptance: Any = None
    agrees: Any = None
    token: Any = None


class ChunkedHeads(NamedTuple):
    """The way of the heads through the output layer.

    Attributes:
        cross_entropy: (labels [b, s], logits [s, b, v]) -> loss [b, s]. It may overwrite the logits.
    """

    projection: Projection
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    settings: HeadSettings

    @property
    def _needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.settings.objective is not None

    def compare(
        self, heads: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], main_model: MainModelRows
    ) -> HeadRows:
        """Do as `run`, without a loss."""
        return self._replace(settings=self.settings._replace(objective=None)).run(heads, labels, main_model)

    def run(
        self, heads: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], main_model: MainModelRows | None
    ) -> HeadRows:
        """Compute the losses of `heads`, each [s, b, h] of `Projection.whole`, for `labels`, each [b, s] int64.

        Args:
            main_model: what the heads are compared with; None for cross entropy alone.
        """
        if main_model is not None:
            heads = [main_model.spread(head, dim=0) for head in heads]
            labels = [main_model.spread(each, dim=1) for each in labels]
        num_rows, batch = heads[0].shape[:2]
        recomputes = self._needs_gradient and not self.projection.is_detached
        if recomputes and main_model is None and len(heads) > 1:  # one after the other, so that chunks have more rows
            results = [self.run([head], [head_labels], None) for head, head_labels in zip(heads, labels, strict=True)]
            return HeadRows(*(torch.cat(column) for column in zip(*results, strict=True)))
        logits_at_a_time = (0 if main_model is None else 1) + (len(heads) if recomputes else 1)
        step = max(1, self.settings.chunk_size // (batch * logits_at_a_time))
        chunks = []
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            compared = None if main_model is None else main_model.hidden[first : first + step + len(heads)]
            chunk = functools.partial(self._chunk, [each[:, rows] for each in labels], compared)
            arguments = [head[rows] for head in heads]
            if recomputes:
                results = checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                results = chunk(*arguments)
            chunks.append(results)
        columns = [torch.cat(column, dim=1) for column in zip(*chunks, strict=True)]
        if main_model is not None:
            columns = [main_model.collect(column, dim=1) for column in columns]
        return HeadRows(*(column.transpose(1, 2) for column in columns))

    def _chunk(
        self, labels: Sequence[torch.Tensor], compared: torch.Tensor | None, *heads: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return HeadRows of some rows as [D, n, b]."""
        if compared is not None:
            with torch.no_grad():
                teacher, main_token = self.projection.vocabulary.log_softmax(self.projection.logits(compared))
        results = []
        for depth, (head, head_labels) in enumerate(zip(heads, labels, strict=True), start=1):
            below = slice(depth, depth + head.size(0))
            distribution = None if compared is None else (teacher[below], main_token[below])
            measure = functools.partial(self._measure, head_labels, distribution)
            if self._needs_gradient and self.projection.is_detached:
                scale = _kl_scale if self.settings.objective == "kl" else torch.ones_like
                results.append(_GradientInForward.apply(measure, scale, head))
            else:
                results.append(measure(head))
        return [torch.stack(column) for column in zip(*results, strict=True)]

    def _measure(
        self, labels: torch.Tensor, distribution: tuple[torch.Tensor, torch.Tensor] | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return HeadRows of one head as [n, b], for labels [b, n] and hidden states [n, b, h]."""
        logits = self.projection.logits(hidden)
        loss = acceptance = logits.new_zeros(logits.shape[:2], dtype=torch.float32)
        agrees = torch.zeros_like(loss, dtype=torch.bool)
        token = torch.zeros_like(loss, dtype=torch.int64)
        if distribution is not None:
            teacher, main_token = distribution
            is_compared_only = self.settings.objective not in OBJECTIVES
            student = logits.detach() if is_compared_only else logits
            objective = "tv" if is_compared_only else self.settings.objective
            divergence, acceptance, token = Divergence.apply(student, teacher, self.projection.vocabulary, objective)
            agrees = token == main_token
            loss = loss if is_compared_only else divergence
        if self.settings.objective == "cross_entropy":
            if self.settings.counts_labels:
                # Before the loss, which may overwrite the logits; padded columns count, as in Megatron.
                token = most_likely_token(logits.detach(), self.projection.vocabulary.group)
            loss = self.cross_entropy(labels, logits).transpose(0, 1)
        return loss, acceptance, agrees, token


def _kl_scale(acceptance: torch.Tensor) -> torch.Tensor:
    """Return what to scale the gradient of KL by, a power of two for each row, from the acceptance [n, b] of a head.

    The gradient of the logits is q - p, whose absolute values add up to twice the total variation. Scaled, they add up
    to 256 to 512. So, with hundreds of thousands of tokens, they are well above the smallest float16, and their product
    with the output weight is well below the largest.
    """
    variation = (1 - acceptance).clamp(min=2.0**-20)  # float32 does not tell less from 0
    return torch.exp2(7 - variation.log2().floor())


class _GradientInForward(torch.autograd.Function):
    """_GradientInForward.apply(measure, scale, hidden): `measure(hidden)`, whose loss comes first, without its graph.

    Each row of the loss depends on its own hidden state alone, so the gradient of their sum has that of each row. It is
    kept multiplied by `scale(acceptance)`, of what `measure` returns second; backward divides by that in float32, so
    what is too large for the dtype of `hidden` then is infinite, as it is for attached heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        measure: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        scale: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = hidden.detach().requires_grad_()
        with torch.enable_grad():
            loss, acceptance, *rest = measure(rows)
            scales = scale(acceptance)
            (gradient,) = torch.autograd.grad(loss, rows, scales.to(loss.dtype))
        ctx.save_for_backward(gradient, scales)
        ctx.mark_non_differentiable(acceptance, *rest)
        return loss.detach(), acceptance, *rest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[None, None, torch.Tensor]:
        grad_rows, scales = ctx.saved_tensors
        return None, None, (grad_rows * (gradient / scales).unsqueeze(-1)).to(grad_rows.dtype)
