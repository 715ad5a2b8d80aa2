"""The gradient norm of an MTP layer that runs for two depths and is recomputed, under DDP and under Megatron-FSDP."""

from ...defects.labs.fsdp_lab import norms_of_a_step

RANKS = 2
NEEDS = ("transformer-engine",)


def reproduce():
    return norms_of_a_step(
        "optim_grads",
        part="mtp.",
        mtp_num_layers=2,
        mtp_use_repeated_layer=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
