"""Attention with an output gate, one query group and two heads on two tensor-parallel ranks."""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_gpt, start

RANKS = 2
NEEDS = ("transformer-engine",)
EXPECTED = "a forward pass"


def reproduce():
    start(tensor_model_parallel_size=2)
    config = make_config(
        tensor_model_parallel_size=2, num_query_groups=1, attention_output_gate=True, add_bias_linear=False
    )
    attention = make_gpt(config, transformer_engine=True).decoder.layers[0].self_attention
    attention(torch.ones(LENGTH, 1, 16), attention_mask=None)
    return EXPECTED, EXPECTED
