"""The gradient norm of routers from aux_loss with a padding mask and --overlap-moe-expert-parallel-comm. It is to be
that without the overlap.
"""

import torch

from ...defects.labs.lab import LENGTH, norm, tokens
from ...defects.labs.moe_lab import make_overlapping_gpt, run_overlapping

RANKS = 2


def reproduce():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    model = make_overlapping_gpt(num_moe_experts=4, **balancing)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    ids, positions = tokens()
    batch = {"labels": ids.roll(-1, 1), "padding_mask": torch.arange(LENGTH).unsqueeze(0) >= LENGTH // 2}

    def take_gradient():
        gradients = [param.grad for name, param in model.named_parameters() if "router" in name]
        model.zero_grad()
        return norm(*(gradient for gradient in gradients if gradient is not None))

    (0 * model(ids, positions, None, **batch)).sum().backward()
    expected = take_gradient()
    run_overlapping(model, ids, positions, **batch)
    return expected, take_gradient()
