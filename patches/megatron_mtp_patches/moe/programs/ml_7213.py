"""The norm of a router's gradient from global_aux_loss over two microbatches, of 16 tokens and of 4."""

from ...defects.labs.lab import LENGTH, make_config, norm, start
from ...defects.labs.moe_lab import EXPERTS

TOP = 2


def reproduce():
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    start()
    settings = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0, "moe_router_topk": TOP}
    config = make_config(num_moe_experts=EXPERTS, add_bias_linear=False, **settings)
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    weight = torch.randn(EXPERTS, config.hidden_size, requires_grad=True)
    with torch.no_grad():
        router.weight.copy_(weight)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    chosen = torch.zeros(EXPERTS)
    for length in (LENGTH, LENGTH // 4):
        hidden_states = torch.randn(length, 1, config.hidden_size)
        scores, _ = router(hidden_states)
        (0 * scores.sum()).backward()
        probabilities = (hidden_states.squeeze(1) @ weight.t()).softmax(-1)
        chosen += torch.zeros_like(probabilities).scatter(1, probabilities.topk(TOP).indices, 1.0).sum(0)
        (EXPERTS * (probabilities.mean(0) * chosen / chosen.sum()).sum()).backward()
    return norm(weight.grad), norm(router.weight.grad)
