"""The divergences of an MTP head from the main model, which it can be trained by.

A draft token is accepted with the probability sum over v of min(p, q), where p is the distribution of the main model
and q that of the head (speculative sampling, arXiv 2211.17192). Total variation is one minus that (arXiv 2606.12370,
equation 10; NVIDIA/Megatron-LM#6473), and LK its negative logarithm (arXiv 2602.23881).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.mtp.losses.vocabulary import Vocabulary

OBJECTIVES = ("kl", "tv", "lk")
# A smaller acceptance has no logarithm and no reciprocal that float32 can hold.
_LOWEST_ACCEPTANCE = torch.finfo(torch.float32).tiny


class Divergence(torch.autograd.Function):
    """The distance of a head from the main model in each row: Divergence.apply(logits, teacher, vocabulary, objective).

    Takes the head's logits [..., v] and the main model's log probabilities [..., v'] (`Vocabulary.log_softmax`), which
    get no gradient. Returns (divergence [...], acceptance [...] without a gradient, the head's most likely token [...]
    int64). The divergence is as `objective` says, one of OBJECTIVES: KL(p || q), the total variation, or the negative
    logarithm of the acceptance. The subgradient of the last two is 0 where p = q. That of "lk" is that of "tv" over the
    acceptance. It adds up to no more than 2, because the mass that is divided is a part of the acceptance.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, teacher: torch.Tensor, vocabulary: Vocabulary, objective: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_q, token = vocabulary.log_softmax(logits)
        p = teacher.exp()
        # Few copies as large as the logits: what is not needed any more is overwritten.
        if objective == "kl":
            q = log_q.exp()
            parts = torch.minimum(p, q).sum(dim=-1), log_q.neg_().add_(teacher).mul_(p).sum(dim=-1)
            acceptance, divergence = vocabulary.sum_over_shards(*parts)
            grad_logits = q.sub_(p)
        else:
            q = log_q.exp_()
            is_under = q < p
            parts = torch.minimum(p, q, out=p).sum(dim=-1), torch.where(is_under, q, 0).sum(dim=-1)
            acceptance, mass_under = vocabulary.sum_over_shards(*parts)
            floored = acceptance.clamp(min=_LOWEST_ACCEPTANCE)
            divergence, slope = (
                (floored.log().neg(), floored.reciprocal())
                if objective == "lk"
                else (1 - acceptance, torch.ones_like(acceptance))
            )
            grad_logits = q.mul_((mass_under * slope).unsqueeze(-1) - is_under * slope.unsqueeze(-1))
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
