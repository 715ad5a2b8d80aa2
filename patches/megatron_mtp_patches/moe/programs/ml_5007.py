"""The norm of a router's gradient from global_aux_loss, averaged over two data-parallel ranks, with the flag of the
patch where there is one. It is to be that of one rank with the tokens of both.
"""

import torch

from ...defects.labs.lab import LENGTH, make_generator, norm, start
from ...defects.labs.moe_lab import WIDTH, make_router

RANKS = 2
SETTING = "moe_global_aux_loss_over_data_parallel"


def reproduce():
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start()
    settings = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0, "moe_router_topk": 2}
    settings |= {SETTING: True} if hasattr(TransformerConfig, SETTING) else {}
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    alone = ProcessGroupCollection.use_mpu_process_groups()
    alone.tp_dp_cp = parallel_state.get_tensor_and_context_parallel_group()  # this rank
    inputs = torch.randn(RANKS, LENGTH, 1, WIDTH, generator=make_generator(2))

    def gradient(hidden_states, groups=None):
        router = make_router(groups, **settings)
        scores, _ = router(hidden_states)
        (0 * scores.sum()).backward()
        return router.weight.grad

    expected = gradient(inputs.flatten(0, 1), alone)
    seen = gradient(inputs[torch.distributed.get_rank()])
    torch.distributed.all_reduce(seen)
    return norm(expected), norm(seen / RANKS)
