"""The gradient norm of the output weight, which an MTP head shares, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norm_under_ddp_and_fsdp
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start()
    return norm_under_ddp_and_fsdp("output_layer.", mtp_num_layers=1)
