"""A residual of 1 + 1/512, which has no place in bf16, after a part of a layer that adds 0, with
--fp32-residual-connection.
"""

RESIDUAL = 1 + 1 / 512
WITHOUT_CUDA = True


def reproduce():
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    added = torch.zeros(1, dtype=torch.bfloat16)
    output = get_bias_dropout_add(training=True, fused=False)((added, None), torch.tensor([RESIDUAL]), 0.0)
    return RESIDUAL, float(output)
