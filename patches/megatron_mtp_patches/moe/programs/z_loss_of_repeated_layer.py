"""The norm of a router's gradient from its z-loss in an MTP layer that runs for two depths with the same hidden states.
It is to be that of the mean of the two passes, as the log has it.
"""

import torch

from ...defects.labs.lab import norm, start
from ...defects.labs.moe_lab import make_router, router_inputs, router_weight

DEPTHS = 2


def reproduce():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start()
    router = make_router(
        moe_router_load_balancing_type="none",
        moe_z_loss_coeff=1.0,
        mtp_num_layers=DEPTHS,
        mtp_use_repeated_layer=True,
    )
    router.is_mtp_layer = True
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    hidden_states, _ = router_inputs(0, 1, False)
    for _ in range(DEPTHS):
        scores, _ = router(hidden_states)
        (0 * scores.sum()).backward()
    weight = router_weight().requires_grad_()
    (hidden_states @ weight.t()).logsumexp(-1).square().mean().backward()
    return norm(weight.grad), norm(router.weight.grad)
