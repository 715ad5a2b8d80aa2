"""A GPT under Megatron-FSDP in bf16 takes over the weights of a checkpoint without those of the optimizer."""

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import make_config, make_gpt, make_optimizer, start

RANKS = 2
NEEDS = ("einops",)
EXPECTED = "main weights"


def reproduce():
    import torch

    start()
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    model = make_fsdp(config, make_gpt(config).bfloat16())
    optimizer = make_optimizer(model, bf16=True, use_distributed_optimizer=True)
    optimizer.reload_model_params()
    return EXPECTED, "main weights"
