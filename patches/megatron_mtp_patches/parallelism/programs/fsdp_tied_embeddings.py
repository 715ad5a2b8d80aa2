"""The gradient norm of a word embedding that is the output weight, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norm_under_ddp_and_fsdp
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start()
    return norm_under_ddp_and_fsdp("word_embeddings.", is_tied=True)
