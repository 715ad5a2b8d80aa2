"""The load balancing loss in the log of a mixture of experts with dense MTP heads: each of the two layers with experts
chooses them all for each token, and so has a loss of 1.
"""

from ...defects.labs.lab import compute_gradients, make_config, make_ddp, make_gpt, start
from ...defects.labs.trainer_lab import TrainingLog

NEEDS = ("megatron.training",)


def reproduce():
    start()
    config = make_config(
        num_layers=4,
        moe_layer_freq=[1, 1, 0, 0],
        num_moe_experts=2,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        mtp_num_layers=2,
        add_bias_linear=False,
    )
    log = TrainingLog(
        "--num-layers 4 --moe-layer-freq ([1]*2+[0]*2) --num-experts 2 --moe-router-topk 2 --mtp-num-layers 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
    )
    compute_gradients(make_ddp(config, make_gpt(config)))
    return 1.0, log.add_step(1)["load_balancing_loss"]
