"""A forward pass of a GPT of TransformerEngine's layers in bf16 with --fp32-residual-connection."""

from ...defects.labs.lab import make_config, make_gpt, start, tokens

NEEDS = ("transformer-engine",)
EXPECTED = "a loss"


def reproduce():
    import torch

    start()
    config = make_config(bf16=True, params_dtype=torch.bfloat16, fp32_residual_connection=True)
    model = make_gpt(config, transformer_engine=True).bfloat16()
    ids, positions = tokens()
    model(ids, positions, None, labels=ids)
    return EXPECTED, EXPECTED
