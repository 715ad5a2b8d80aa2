"""The losses of the heads in float64, by autograd, from the full logits of all positions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.oracles.losses.conditions import DEPTHS, DPACE_ALPHA, Condition


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


def make_problem(condition: Condition, batch_number: int = 0) -> Problem:
    """Return seeded hidden states, labels and a mask, the same on each rank; another batch has the same weight."""
    layout = condition.layout
    length, batch, hidden_size, rows, tokens = layout.pack.size, layout.batch, 16, 48, 45
    generator = torch.Generator().manual_seed(7 + batch_number)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator)
        return values.to(getattr(torch, condition.dtype)).double()

    hidden = draw(1 + DEPTHS, length, batch, hidden_size)
    # A head resembles what it is compared with, so neither distribution is far from the other.
    for depth in range(1, 1 + DEPTHS):
        hidden[depth] = (0.7 * hidden[0].roll(-depth, 0) + 0.6 * hidden[depth]).to(getattr(torch, condition.dtype))
    labels = torch.randint(0, tokens, (length, batch), generator=generator)
    mask = _make_mask(condition, batch_number, generator) * torch.tensor(layout.pack.holds_token).unsqueeze(1)
    weight = draw(rows, hidden_size) if batch_number == 0 else make_problem(condition).weight
    return Problem(hidden, weight, tokens, labels, mask, 0.8, (1.0, 0.5, 2.0))


def _make_mask(condition: Condition, batch_number: int, generator: torch.Generator) -> torch.Tensor:
    """Return [S, b] as `condition.mask` says."""
    layout = condition.layout
    shape = (layout.pack.size, layout.batch)
    if condition.mask == "holes":
        return (torch.rand(shape, generator=generator) > 0.06).double()
    mask = torch.zeros(shape, dtype=torch.float64)
    if condition.mask == "ones" or (condition.mask == "one batch" and batch_number == 0):
        mask[:] = 1
    elif condition.mask == "tail":
        mask[: 2 * shape[0] // 3 - 4 * batch_number] = 1
    elif condition.mask == "one rank":
        mask[layout.pack.of_rank(list(range(shape[0])), layout.context - 1, layout.context)] = 1
    return mask


class Answer(NamedTuple):
    """What a loss and its gradient add up to on the ranks that share a batch, before Megatron divides by anything.

    Attributes:
        loss: a scalar, the sum of what is attached to the main model's hidden states.
        heads: [D, S, b, h], the gradient of the heads' hidden states.
        weight: [V, h], that of the output weight; zero if the heads are detached.
    """

    loss: torch.Tensor
    heads: torch.Tensor
    weight: torch.Tensor


def answer(condition: Condition, problem: Problem) -> Answer:
    """Return what the context-parallel ranks of a batch have together: the answer of one rank with the whole batch.

    DDP averages over the context-parallel ranks. With a per-token loss it adds up, and `finalize_model_grads` divides
    by the tokens of the main model.
    """
    heads = problem.hidden[1:].clone().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    values, masks = _losses(condition, problem, heads, weight.detach() if condition.is_detached else weight)
    weights = torch.tensor(problem.depth_weights, dtype=torch.float64)
    weights /= weights.mean()
    if condition.loss_type == "e2e_tv":
        mean = _mean(1 - (weights.view(-1, 1, 1) * values.cumprod(0)).mean(0), masks.prod(0))
    else:
        means = [_mean(*pair) for pair in zip(values, masks, strict=True)]
        mean = sum(one * value for one, value in zip(weights, means, strict=True)) / DEPTHS
    loss = mean * (problem.mask.sum() if condition.is_per_token else condition.layout.context)
    loss.backward()
    return Answer(loss.detach(), heads.grad, torch.zeros_like(weight) if weight.grad is None else weight.grad)


def _losses(
    condition: Condition, problem: Problem, heads: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [D, S, b] twice: the loss of each head (for e2e_tv its acceptance), and its mask."""
    pack = condition.layout.pack

    def roll(values: torch.Tensor) -> torch.Tensor:
        following = pack.roll(list(range(pack.size)), fill=-1)
        return torch.stack([values[slot] if slot >= 0 else torch.zeros_like(values[0]) for slot in following])

    labels, mask, teacher = problem.labels, problem.mask, problem.hidden[0] @ problem.weight.T * problem.logit_scale
    losses, masks = [], []
    for head in heads:
        labels, mask, teacher = roll(labels), roll(mask), roll(teacher)
        logits = head @ weight.T * problem.logit_scale
        p, log_p = (teacher[..., : problem.tokens].softmax(-1), teacher[..., : problem.tokens].log_softmax(-1))
        log_q = logits[..., : problem.tokens].log_softmax(-1)
        acceptance = torch.minimum(p, log_q.exp()).sum(-1)
        cross_entropy = torch.nn.functional.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none")
        kl = (p * (log_p - log_q)).sum(-1)
        by_type = {
            "cross_entropy": cross_entropy,
            "dpace": cross_entropy,
            "kl": kl,
            "tv": 1 - acceptance,
            "lk": -acceptance.log(),
            "e2e_tv": acceptance,
        }
        losses.append(by_type[condition.loss_type])
        masks.append(mask)
    values, counted = torch.stack(losses), torch.stack(masks)
    return (values * _dpace_weights(values.detach(), counted) if condition.loss_type == "dpace" else values), counted


def _dpace_weights(losses: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return [D, S, b], the derivative of the expected length of each draft by the logarithm of each confidence.

    D-PACE (arXiv 2605.18810) is made so: the length is the sum over the heads of the product of the confidences up to
    that head, of which a position that does not count is no part.
    """
    logarithms = (DPACE_ALPHA + (1 - DPACE_ALPHA) * (-losses).exp()).log().mul(masks).requires_grad_()
    (weights,) = torch.autograd.grad((logarithms.cumsum(0).exp() * masks).sum(), logarithms)
    return weights


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the positions that count."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
