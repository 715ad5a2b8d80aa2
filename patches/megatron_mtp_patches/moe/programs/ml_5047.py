"""The norm of a router's gradient from aux_loss and z-loss with --calculate-per-token-loss on two tensor-parallel
ranks. It is to be that without the flag.
"""

from ...defects.labs.moe_lab import norms_of_router_gradients

RANKS = 2


def reproduce():
    return norms_of_router_gradients("aux_loss", moe_aux_loss_coeff=1.0, moe_z_loss_coeff=1.0)
