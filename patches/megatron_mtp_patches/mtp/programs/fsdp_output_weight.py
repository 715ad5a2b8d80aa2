"""The gradient norm of the output weight, which an MTP head shares, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine", "Apex")


def reproduce():
    return norms_of_a_step(part="output_layer.", is_fused=True, mtp_num_layers=1)
