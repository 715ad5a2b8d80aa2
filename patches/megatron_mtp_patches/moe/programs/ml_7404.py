"""A model of two layers with experts and one MTP head is given the routes that an inference engine has recorded of its
two layers.
"""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_gpt, start

EXPECTED = "the routes of both layers"


def reproduce():
    from megatron.core.transformer.moe.router_replay import RouterReplay

    start()
    make_gpt(
        make_config(
            num_layers=2, num_moe_experts=4, mtp_num_layers=1, moe_enable_routing_replay=True, add_bias_linear=False
        )
    )
    RouterReplay.set_replay_data([torch.zeros(LENGTH, 2, dtype=torch.long)] * 2)
    return EXPECTED, EXPECTED
