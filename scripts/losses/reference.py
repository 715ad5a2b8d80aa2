"""The losses of the heads in float64, by autograd, from the full logits of all positions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scripts.losses.conditions import DEPTHS, Condition


class Problem(NamedTuple):
    """What the heads are given, whole, in float64.

    Attributes:
        hidden: [1 + D, S, b, h], of the main model and of the heads.
        weight: [V, h], rows of padding at its end.
        tokens: how many rows of it stand for tokens.
        labels: [S, b] int64.
        mask: [S, b], 1 where a position counts.
        logit_scale: what the logits are multiplied by.
        depth_weights: as `mtp_depth_weights`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    tokens: int
    labels: torch.Tensor
    mask: torch.Tensor
    logit_scale: float
    depth_weights: tuple[float, ...]


def make_problem(condition: Condition, seed: int = 7) -> Problem:
    """Return seeded hidden states, labels and a mask with holes, the same on each rank."""
    layout = condition.layout
    length, batch, hidden_size, rows, tokens = layout.pack.size, layout.batch, 16, 48, 45
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator)
        return values.to(getattr(torch, condition.dtype)).double()

    hidden = draw(1 + DEPTHS, length, batch, hidden_size)
    # A head resembles what it is compared with, so neither distribution is far from the other.
    for depth in range(1, 1 + DEPTHS):
        hidden[depth] = (0.7 * hidden[0].roll(-depth, 0) + 0.6 * hidden[depth]).to(getattr(torch, condition.dtype))
    labels = torch.randint(0, tokens, (length, batch), generator=generator)
    mask = (torch.rand(length, batch, generator=generator) > 0.06).double()
    mask *= torch.tensor(layout.pack.holds_token).unsqueeze(1)
    return Problem(hidden, draw(rows, hidden_size), tokens, labels, mask, 0.8, (1.0, 0.5, 2.0))


class Answer(NamedTuple):
    """The loss of one rank, and its gradient.

    Attributes:
        loss: a scalar, the sum of what is attached to the main model's hidden states.
        heads: [D, S, b, h], the gradient of the heads' hidden states.
        weight: [V, h], that of the output weight; zero if the heads are detached.
    """

    loss: torch.Tensor
    heads: torch.Tensor
    weight: torch.Tensor


def answer(condition: Condition, problem: Problem, slots: list[int]) -> Answer:
    """Return the loss of the rank that has `slots` of the whole."""
    pack = condition.layout.pack

    def roll(values: torch.Tensor) -> torch.Tensor:
        following = pack.roll(list(range(pack.size)), fill=-1)
        return torch.stack([values[slot] if slot >= 0 else torch.zeros_like(values[0]) for slot in following])

    heads = problem.hidden[1:].clone().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    used = weight.detach() if condition.is_detached else weight
    labels, mask, teacher = problem.labels, problem.mask, problem.hidden[0] @ problem.weight.T * problem.logit_scale
    losses, masks, acceptances = [], [], []
    for head in heads:
        labels, mask, teacher = roll(labels), roll(mask), roll(teacher)
        logits = head @ used.T * problem.logit_scale
        p, log_p = (teacher[..., : problem.tokens].softmax(-1), teacher[..., : problem.tokens].log_softmax(-1))
        log_q = logits[..., : problem.tokens].log_softmax(-1)
        acceptance = torch.minimum(p, log_q.exp()).sum(-1)
        cross_entropy = torch.nn.functional.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")
        kl = (p * (log_p - log_q)).sum(-1)
        losses.append({"cross_entropy": cross_entropy, "kl": kl, "tv": 1 - acceptance}.get(condition.loss_type))
        masks.append(mask)
        acceptances.append(acceptance)
    weights = torch.tensor(problem.depth_weights, dtype=torch.float64)
    weights /= weights.mean()
    if condition.loss_type == "e2e_tv":
        prefixes = torch.stack(acceptances).cumprod(0)
        chain = torch.stack(masks).prod(0)
        loss = _mean(1 - (weights.view(-1, 1, 1) * prefixes).mean(0), chain, slots)
    else:
        means = (_mean(*each, slots) for each in zip(losses, masks, strict=True))
        loss = sum(one * mean for one, mean in zip(weights, means, strict=True)) / DEPTHS
    loss.backward()
    return Answer(loss.detach(), heads.grad, torch.zeros_like(weight) if weight.grad is None else weight.grad)


def _mean(values: torch.Tensor, mask: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Return the mean over the positions in `slots` that count."""
    return (values * mask)[slots].sum() / mask[slots].sum().clamp(min=1)
