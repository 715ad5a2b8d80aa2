"""The norm of a router's gradient from seq_aux_loss in a layer of a GPT that gets two sequences of 8 tokens: as two
samples, and packed into one.
"""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_generator, make_gpt, norm, start

NEEDS = ("transformer-engine",)


def reproduce():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    start()
    config = make_config(
        num_layers=1,
        num_moe_experts=4,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1.0,
        add_bias_linear=False,
    )
    layer = make_gpt(config).decoder.layers[0]
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    layer.self_attention.forward = lambda hidden_states, **how: (torch.zeros_like(hidden_states), None)
    samples = torch.randn(LENGTH // 2, 2, config.hidden_size, generator=make_generator(1))
    ends = torch.tensor([0, LENGTH // 2, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=LENGTH // 2)
    norms = []
    for states, params in ((samples, None), (samples.transpose(0, 1).reshape(LENGTH, 1, -1), packed)):
        layer.zero_grad()
        output, _ = layer(states, None, packed_seq_params=params)
        (0 * output.sum()).backward()
        norms.append(norm(layer.mlp.router.weight.grad))
    return tuple(norms)
