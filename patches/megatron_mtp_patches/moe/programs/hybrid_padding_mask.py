"""A forward pass with a padding mask of a hybrid model of experts on two tensor-parallel ranks, with
--sequence-parallel.
"""

import inspect

import torch

from ...defects.labs.hybrid_lab import find_hybrid_model
from ...defects.labs.lab import LENGTH, VOCABULARY, make_config, start, tokens

RANKS = 2
NEEDS = ("transformer-engine",)
EXPECTED = "a forward pass"


def reproduce():
    start(tensor_model_parallel_size=2)
    config = make_config(
        num_moe_experts=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    model, spec = find_hybrid_model()
    ids, positions = tokens()
    is_padding = torch.arange(LENGTH).unsqueeze(0) >= LENGTH - 3
    takes_pattern = "hybrid_layer_pattern" in inspect.signature(model).parameters  # in 0.16 it is called otherwise
    pattern = {"hybrid_layer_pattern" if takes_pattern else "hybrid_override_pattern": "*E"}
    hybrid = model(config, spec, VOCABULARY, LENGTH, **pattern)
    hybrid(ids, positions, None, labels=ids, padding_mask=is_padding)
    return EXPECTED, EXPECTED
