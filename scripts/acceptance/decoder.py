"""A small speculative decoder: greedy verification or rejection sampling, the heads run over the whole prefix.

A verification step begins with a known token, the last one. Head d drafts the d-th token after it, from the main
model's hidden state one position earlier and from the known and drafted tokens in between. Then the main model sees all
drafts at once. The step yields the drafts that it accepts, and one token of the main model (arXiv 2211.17192).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron_mtp_patches import mtp_pass

from scripts.tiny_gpt import causal_inputs


class Logits(NamedTuple):
    """Of the main model [b, n, v] and of the heads [D, b, n, v], each head's at the position that it starts from."""

    main: torch.Tensor
    heads: torch.Tensor


@torch.no_grad()
def forward(model: Any, tokens: torch.Tensor) -> Logits:
    """Run model and heads over `tokens`, [b, n] int64, in an `mtp_pass(compute=True)`.

    What stands after a position does not change its logits.
    """
    outputs: list[torch.Tensor] = []
    handle = model.mtp.register_forward_hook(lambda _, __, hidden: outputs.append(hidden))
    *inputs, _ = causal_inputs(torch.nn.functional.pad(tokens, (0, 1)))
    try:
        model(*inputs)
    finally:
        handle.remove()
    hidden = torch.stack(outputs[0].chunk(1 + model.config.mtp_num_layers)).transpose(1, 2)
    main, *heads = (torch.nn.functional.linear(each, model.output_layer.weight).double() for each in hidden)
    return Logits(main, torch.stack(heads))


class Step(NamedTuple):
    """One verification step of each row: [b] accepted drafts, and [b, D + 1] tokens, which begin with them.

    After the accepted drafts comes one token of the main model; what follows it is of no use.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor


def verify(model: Any, tokens: torch.Tensor, lengths: torch.Tensor, sampler: torch.Generator | None) -> Step:
    """Draft and verify once, in an `mtp_pass(compute=True)`.

    Args:
        tokens: [b, n] int64; a row has `lengths` known tokens, at least two.
        sampler: draws drafts and decides by rejection sampling; None for greedy verification.
    """
    depths = model.config.mtp_num_layers
    rows = torch.arange(tokens.size(0))
    # Pad, or cut off what is known in no row.
    text = torch.nn.functional.pad(tokens, (0, int(lengths.max()) + depths - tokens.size(1)))
    drafts, distributions = [], []
    for depth in range(1, depths + 1):
        q = forward(model, text).heads[depth - 1][rows, lengths - 2].softmax(-1)
        drafts.append(_choose(q, sampler))
        distributions.append(q)
        text[rows, lengths + depth - 1] = drafts[-1]
    main = forward(model, text).main.softmax(-1)
    accepted, alive = torch.zeros_like(lengths), torch.ones_like(lengths, dtype=torch.bool)
    corrections = []
    for depth, (draft, q) in enumerate(zip(drafts, distributions, strict=True), start=1):
        p = main[rows, lengths + depth - 2]
        if sampler is None:
            alive = alive & (draft == p.argmax(-1))
            corrections.append(p.argmax(-1))
        else:
            ratio = p[rows, draft] / q[rows, draft]
            alive = alive & (torch.rand(len(rows), generator=sampler, dtype=p.dtype) < ratio)
            rest = (p - q).clamp(min=0)
            corrections.append(_choose(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p), sampler))
        accepted = accepted + alive
    corrections.append(_choose(main[rows, lengths + depths - 1], sampler))
    own = torch.stack(corrections)[accepted, rows]
    tokens = torch.stack([*drafts, torch.zeros_like(own)], dim=1)
    tokens[rows, accepted] = own
    return Step(accepted, tokens)


class Decoded(NamedTuple):
    """The decoded tokens: [b, n] tokens with the prompt; and the mean number of tokens of a verification step."""

    tokens: torch.Tensor
    tokens_per_step: float


def decode(model: Any, prompts: torch.Tensor, length: int, sampler: torch.Generator | None) -> Decoded:
    """Go on from `prompts`, [b, m] int64, until each row has `length` tokens."""
    rows = torch.arange(len(prompts))
    tokens = torch.nn.functional.pad(prompts, (0, length - prompts.size(1)))
    lengths = torch.full((len(prompts),), prompts.size(1))
    steps = produced = 0
    while (unfinished := lengths < length).any():
        with mtp_pass(compute=True):
            step = verify(model, tokens, lengths, sampler)
        steps += int(unfinished.sum())
        produced += int((1 + step.accepted)[unfinished].sum())
        for place, column in enumerate(step.tokens.unbind(1)):
            used = unfinished & (place <= step.accepted) & (lengths + place < length)
            tokens[rows[used], (lengths + place)[used]] = column[used]
        lengths = torch.where(unfinished, (lengths + 1 + step.accepted).clamp(max=length), lengths)
    return Decoded(tokens, produced / steps)


def accepted_from_every_position(model: Any, text: torch.Tensor, first: int, sampler: torch.Generator | None) -> float:
    """Return the mean tokens of a verification step that begins after each token of `text` from `first` on.

    Args:
        text: [b, n] int64. A step counts if all of its drafts lie within it.
    """
    depths = model.config.mtp_num_layers
    total = count = 0
    for row in text:
        lengths = torch.arange(first, len(row) - depths + 1)
        with mtp_pass(compute=True):
            step = verify(model, row.expand(len(lengths), -1).clone(), lengths, sampler)
        total += int((1 + step.accepted).sum())
        count += len(lengths)
    return total / count


def _choose(probabilities: torch.Tensor, sampler: torch.Generator | None) -> torch.Tensor:
    """Return the most likely token of [b, v], or one drawn by `sampler`."""
    if sampler is None:
        return probabilities.argmax(-1)
    return torch.multinomial(probabilities, 1, generator=sampler).squeeze(-1)
