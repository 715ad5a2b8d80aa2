"""The divergences of an MTP head from the main model, which it can be trained by: total variation and Kullback-Leibler.

A draft token is accepted with the probability sum over v of min(p, q), where p is the distribution of the main model
and q that of the head (speculative sampling, arXiv 2211.17192). Total variation is one minus that (arXiv 2606.12370,
equation 10; NVIDIA/Megatron-LM#6473).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.mtp.losses.vocabulary import Vocabulary


class Divergence(torch.autograd.Function):
    """How far a head is from the main model, row by row: Divergence.apply(logits, teacher, vocabulary, is_kl).

    Takes the head's logits [..., v] and the main model's log probabilities [..., v'] (`Vocabulary.log_softmax`), which
    get no gradient. Returns (divergence [...], acceptance [...] without a gradient, the head's most likely token [...]
    int64). The divergence is KL(p || q) or the total variation; the subgradient of the latter is 0 where p = q.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, teacher: torch.Tensor, vocabulary: Vocabulary, is_kl: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_q, token = vocabulary.log_softmax(logits)
        p = teacher.exp()
        # Few copies as large as the logits: what is not needed any more is overwritten.
        if is_kl:
            q = log_q.exp()
            parts = torch.minimum(p, q).sum(dim=-1), log_q.neg_().add_(teacher).mul_(p).sum(dim=-1)
            acceptance, divergence = vocabulary.sum_over_shards(*parts)
            grad_logits = q.sub_(p)
        else:
            q = log_q.exp_()
            is_under = q < p
            parts = torch.minimum(p, q, out=p).sum(dim=-1), torch.where(is_under, q, 0).sum(dim=-1)
            acceptance, mass_under = vocabulary.sum_over_shards(*parts)
            divergence = 1 - acceptance
            grad_logits = q.mul_(mass_under.unsqueeze(-1) - is_under.float())
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(grad_logits)
        ctx.columns, ctx.dtype = logits.size(-1), logits.dtype
        ctx.mark_non_differentiable(acceptance, token)
        return divergence, acceptance, token

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None, None]:
        (grad_logits,) = ctx.saved_tensors
        token_grads = (grad_logits * gradient.unsqueeze(-1)).to(ctx.dtype)
        return torch.nn.functional.pad(token_grads, (0, ctx.columns - token_grads.size(-1))), None, None, None
