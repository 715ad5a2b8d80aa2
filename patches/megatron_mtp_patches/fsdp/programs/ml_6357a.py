"""The gradient norm of weights of TransformerEngine's layers in a GPT, over three microbatches, under DDP and under
Megatron-FSDP with optim, where backward passes add these gradients up themselves.
"""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step("optim", 3, "linear_qkv.weight", is_fused=True)
