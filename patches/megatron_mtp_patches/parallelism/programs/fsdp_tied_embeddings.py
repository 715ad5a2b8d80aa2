"""The gradient norm of a word embedding that is the output weight, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step(part="word_embeddings.", is_fused=True, is_tied=True)
