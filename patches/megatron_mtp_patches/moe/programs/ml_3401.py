"""The load balancing loss in the log of two pipeline stages, the first of which has no experts, and an MTP head with
experts. Each layer with experts chooses them all for each token, and so has a loss of 1.
"""

from ...defects.labs.lab import compute_gradients, gather, make_config, make_ddp, make_gpt, start

RANKS = 2
EXPECTED = [1.0, 1.0]
LIMIT = 5.0  # seconds; the log hangs, or adds what does not belong together


def reproduce():
    import torch
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    start(pipeline_model_parallel_size=2)
    config = make_config(
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        moe_layer_freq=[0, 1],
        num_moe_experts=2,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        mtp_num_layers=1,
        add_bias_linear=False,
    )
    compute_gradients(make_ddp(config, make_gpt(config)))
    log: dict[str, torch.Tensor] = {}
    track_moe_metrics(
        loss_scale=1.0,
        iteration=1,
        total_loss_dict=log,
        force_initialize=True,
        track_names=["load_balancing_loss"],
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
    )
    return EXPECTED, gather(float(log["load_balancing_loss"]))
