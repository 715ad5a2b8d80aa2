"""The norm of a router's gradient from global_aux_loss, averaged over two data-parallel ranks, with the flag of the
patch where there is one. It is to be that of one rank with the tokens of both.
"""

from ..lab import LENGTH, make_config, norm, start
from ..moe_lab import EXPERTS, WIDTH, router_weight

RANKS = 2
TOP = 2
SETTING = "moe_global_aux_loss_over_data_parallel"


def reproduce():
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    start()
    settings = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0, "moe_router_topk": TOP}
    settings |= {SETTING: True} if hasattr(TransformerConfig, SETTING) else {}
    config = make_config(hidden_size=WIDTH, num_moe_experts=EXPERTS, add_bias_linear=False, **settings)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    alone = ProcessGroupCollection.use_mpu_process_groups()
    alone.tp_dp_cp = parallel_state.get_tensor_and_context_parallel_group()  # this rank
    inputs = torch.randn(RANKS, LENGTH, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    own = inputs[torch.distributed.get_rank()]

    def gradient(hidden_states, groups):
        router = TopKRouter(config, groups)
        router.set_layer_number(1)
        with torch.no_grad():
            router.weight.copy_(router_weight())
        scores, _ = router(hidden_states)
        (0 * scores.sum()).backward()
        return router.weight.grad

    expected = gradient(inputs.flatten(0, 1), alone)
    seen = gradient(own, ProcessGroupCollection.use_mpu_process_groups())
    torch.distributed.all_reduce(seen)
    return norm(expected), norm(seen / RANKS)
