"""The gradient norm of an MTP head that runs for two depths, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step(part="mtp.", is_fused=True, mtp_num_layers=2, mtp_use_repeated_layer=True)
