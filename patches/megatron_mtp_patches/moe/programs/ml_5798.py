"""The norm of a router's gradient from seq_aux_loss with --calculate-per-token-loss, four samples in a microbatch and
two tensor-parallel ranks. It is to be that without the flag.
"""

from ...defects.labs.moe_lab import norms_of_router_gradients

RANKS = 2


def reproduce():
    return norms_of_router_gradients("seq_aux_loss", samples=4, moe_aux_loss_coeff=1.0)
