"""The norm of a router's gradient from aux_loss with --calculate-per-token-loss and a padding mask on two
tensor-parallel ranks, the second of which has padding. It is to be that without the flag.
"""

from ...defects.labs.moe_lab import norms_of_router_gradients

RANKS = 2


def reproduce():
    return norms_of_router_gradients("aux_loss", is_padded=True, moe_aux_loss_coeff=1.0)
