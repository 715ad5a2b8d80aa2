"""The norm of a router's gradient from its z-loss on two tensor-parallel ranks, the second of which has padding. It is
to be that of a mean over the tokens of both.
"""

import torch

from ...defects.labs.lab import norm, start
from ...defects.labs.moe_lab import norm_of_router_gradient, router_inputs, router_weight

RANKS = 2


def reproduce():
    start(tensor_model_parallel_size=RANKS)
    seen = norm_of_router_gradient(1, True, moe_router_load_balancing_type="none", moe_z_loss_coeff=1.0)
    weight = router_weight().requires_grad_()
    inputs = [router_inputs(rank, 1, True) for rank in range(RANKS)]
    tokens = torch.cat([hidden_states[~is_padding] for hidden_states, is_padding in inputs])
    (tokens @ weight.t()).logsumexp(-1).square().mean().backward()
    return norm(weight.grad), seen
