"""The gradient norm of an MTP head that runs for two depths, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norm_under_ddp_and_fsdp
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start()
    return norm_under_ddp_and_fsdp("mtp.", mtp_num_layers=2, mtp_use_repeated_layer=True)
