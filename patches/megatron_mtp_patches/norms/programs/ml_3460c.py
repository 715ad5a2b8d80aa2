"""A step of Megatron-FSDP with --grad-norm-skip-threshold 1e-6: it should be skipped."""

from ...defects.labs.fsdp_lab import make_fsdp
from ...defects.labs.lab import compute_gradients, make_config, make_gpt, make_optimizer, start

RANKS = 2
NEEDS = ("einops",)
EXPECTED = "skipped"


def reproduce():
    start()
    config = make_config()
    model = make_fsdp(config, make_gpt(config))
    optimizer = make_optimizer(model, use_distributed_optimizer=True, grad_norm_skip_threshold=1e-6)
    compute_gradients(model)
    updated, _, _ = optimizer.step()
    return EXPECTED, "taken" if updated else "skipped"
