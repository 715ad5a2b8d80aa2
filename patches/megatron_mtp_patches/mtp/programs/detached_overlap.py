"""The gradient norm of the main model from the loss of detached MTP heads, with --overlap-moe-expert-parallel-comm."""

from ...defects.labs.lab import norm, tokens
from ...defects.labs.moe_lab import make_overlapping_gpt, run_overlapping

RANKS = 2


def reproduce():
    balancing = {"moe_router_load_balancing_type": "none"}
    model = make_overlapping_gpt(num_moe_experts=2, mtp_num_layers=1, mtp_detach_heads=True, **balancing)
    ids, positions = tokens()
    run_overlapping(model, ids, positions, labels=ids.roll(-1, 1))  # leaves the loss of the heads
    main_model = [param.grad for name, param in model.named_parameters() if "mtp." not in name]
    return 0.0, norm(*(gradient for gradient in main_model if gradient is not None))
