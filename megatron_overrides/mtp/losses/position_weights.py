"""Weights of the cross entropy at each position of each head, from what the heads find likely themselves: D-PACE.

arXiv 2605.18810, equations 7 to 9. A draft that starts at a position has one token of each head, so the heads of one
row are one block of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dpace_weights(losses: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], alpha: float) -> torch.Tensor:
    """Return [D, b, s] float32 without a gradient, what each head adds to the expected length of the accepted draft.

    With the probability q_d that head d gives its label, it is the sum over m >= d of c_1 ... c_m, where
    c_d = (1 - alpha) q_d + alpha. A position that does not count neither divides a draft nor adds to its length.

    Args:
        losses: D times [b, s], the cross entropy of each head.
        counts: D times [b, s] bool, whether a position counts.
        alpha: above 0, up to 1; with 1, the weights of a draft that counts throughout are D, ..., 2, 1.
    """
    with torch.no_grad():
        is_counted = torch.stack(list(counts))
        likely = torch.stack(list(losses)).float().neg().exp()
        prefixes = torch.where(is_counted, alpha + (1 - alpha) * likely, 1).cumprod(dim=0) * is_counted
        return prefixes.flip(0).cumsum(dim=0).flip(0)
