"""The wrappers around Newton-Schulz of emerging_optimizers: the scale of its input.

An input whose norm is smaller than the floor that it is divided by is multiplied by a power of two before it is
squared, which changes no digit of it. So squares do not underflow, and there is no host-device sync to find out whether
the input is small.
"""

from __future__ import annotations

import torch

from megatron_overrides.call import Call

# The square of a norm under the floor, times this squared, is a float32 for any floor up to 10.
_LIFT = 2.0**60


def rescale_small_input(call: Call) -> torch.Tensor:
    """Wraps newton_schulz(x, ..., eps, ..., tp_group): float32 matrices [m, n] or [batch, m, n], whole on this rank.

    With a tp_group, `x` is a shard, and normalize_with_rescaling does this with the norm over all shards.
    """
    x = call["x"]
    if call["tp_group"] is None and x.dtype == torch.float32 and x.ndim in (2, 3):  # it refuses all others
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        call["x"] = x * _factor(norm, call["eps"])
    return call.proceed()


def normalize_with_rescaling(call: Call) -> torch.Tensor:
    """Wraps distributed_normalize_p2(x, eps, group): `x` divided by its norm over `group`, or by `eps` if that is more.

    One reduction, as there: of the norm, and of the norm of the larger `x`.
    """
    x, eps, group = call["x"], call["eps"], call["group"]
    lifted = x * _LIFT
    squares = torch.stack([(x * x).sum(), (lifted * lifted).sum()])
    torch.distributed.all_reduce(squares, op=torch.distributed.ReduceOp.SUM, group=group)
    norm, lifted_norm = torch.sqrt(squares)
    is_small = norm < eps
    return torch.where(is_small, lifted, x) / torch.where(is_small, lifted_norm, norm).clamp_min(eps)


def _factor(norm: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.where(norm < eps, _LIFT, 1.0)
