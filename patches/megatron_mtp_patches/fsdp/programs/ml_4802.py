"""The number of gradients that are 0 in a step of Megatron-FSDP, without and with --use-precision-aware-optimizer."""

from ...defects.labs.fsdp_lab import step_in_bf16
from ...defects.labs.lab import start

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    start()
    return step_in_bf16(False).zeros, step_in_bf16(True).zeros
