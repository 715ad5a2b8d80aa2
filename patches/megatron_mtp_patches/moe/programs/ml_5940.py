"""The outputs of a dense layer with the fused kernel of SwiGLU, whose inputs are to be clamped at 0.5; and what the
clamp gives in plain torch.
"""

import torch

from ...defects.labs.lab import make_config, norm, start

LIMIT, LENGTH = 0.5, 4


def reproduce():
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    start()
    config = make_config(
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        bias_activation_fusion=True,
        add_bias_linear=False,
        activation_func_clamp_value=LIMIT,
    )
    layer = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    states = 100 * torch.randn(LENGTH, 1, config.hidden_size)
    gate, linear = (states @ layer.linear_fc1.weight.t()).chunk(2, dim=-1)
    clamped = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * linear.clamp(-LIMIT, LIMIT)
    return norm(clamped @ layer.linear_fc2.weight.t()), norm(layer(states)[0])
