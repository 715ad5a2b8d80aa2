"""Counts the gradients of experts under Megatron-FSDP that are 0, without and with a precision-aware optimizer."""

from ...defects.labs.fsdp_lab import step_in_bf16
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start()
    experts = {"num_moe_experts": 2, "add_bias_linear": False}
    return step_in_bf16(False, **experts).zeros, step_in_bf16(True, **experts).zeros
