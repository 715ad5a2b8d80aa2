"""A forward pass with a padding mask of a GPT of experts on two pipeline stages of two tensor-parallel ranks, with
--sequence-parallel.
"""

import torch

from ...defects.labs.lab import LENGTH, make_config, make_gpt, start, tokens

RANKS = 4
EXPECTED = "a forward pass on each stage"


def reproduce():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    start(**sizes)
    experts = {"num_moe_experts": 4, "moe_z_loss_coeff": 1.0, "add_bias_linear": False, "sequence_parallel": True}
    model = make_gpt(make_config(pipeline_dtype=torch.float32, **sizes, **experts), transformer_engine=True)
    model.set_input_tensor(torch.randn(LENGTH // 2, 1, model.config.hidden_size))
    ids, positions = tokens()
    attention_mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    model(ids, positions, attention_mask, padding_mask=torch.arange(LENGTH).unsqueeze(0) >= LENGTH - 3)
    return EXPECTED, EXPECTED
