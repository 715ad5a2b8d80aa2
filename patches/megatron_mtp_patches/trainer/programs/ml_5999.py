"""The activation with use_te_activation_func and SiLU that is not gated, of -1 and 1."""

from ...defects.labs.lab import make_config, start

NEEDS = ("transformer-engine",)


def reproduce():
    import torch
    from megatron.core.extensions.transformer_engine import TEActivationOp

    start()
    silu = torch.nn.functional.silu
    config = make_config(use_te_activation_func=True, activation_func=silu, add_bias_linear=False)
    inputs = torch.tensor([[-1.0, 1.0]])
    return (inputs / (1 + torch.exp(-inputs)))[0].tolist(), TEActivationOp(config)(inputs)[0].tolist()
