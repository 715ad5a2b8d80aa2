"""Declares weight-moe-losses-by-token."""

from ..engine import Patch, Probe, PullRequest, Wrap
from .count_moe_tokens_once import COUNT_TOKENS_ONCE

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_LOSSES = "megatron_overrides.moe.router_losses"

PATCH = Patch(
    id="weight-moe-losses-by-token",
    summary="Give MoE losses the weight of their coefficients with --calculate-per-token-loss",
    upstream=(PullRequest(5047, native_since="0.19.0"), PullRequest(5798, native_since="0.19.0")),
    problem="With `--calculate-per-token-loss` the gradients of the auxiliary losses and of the z-loss are too small "
    "by the product of tensor and context parallelism on 0.16 to 0.18, and those of seq_aux_loss by the micro batch "
    "size as well. Experts are then balanced less than the coefficients ask for; the logged losses look right.",
    adds=("The gradients are those of a run without `--calculate-per-token-loss`.",),
    numerics="With `--calculate-per-token-loss` and experts: the gradients of the auxiliary losses and of the z-loss, "
    "with tensor or context parallelism or, for seq_aux_loss, several samples in a microbatch. Coefficients that "
    "were tuned under these settings act more strongly.",
    notes=(
        "Where a trainer passes a padding mask, two errors of Megatron cancelled each other in the auxiliary losses; "
        "`count-moe-tokens-once` removes the second one. Leave out both or neither.",
    ),
    is_repair=True,
    probe=Probe(f"{_ROUTER}._apply_seq_aux_loss", contains="local_num_tokens * bsz"),
    edits=(
        Wrap(f"{_ROUTER}.attach_and_log_load_balancing_loss", f"{_LOSSES}:weight_aux_loss"),
        Wrap(f"{_ROUTER}._apply_seq_aux_loss", f"{_LOSSES}:weight_seq_aux_loss"),
        Wrap(f"{_ROUTER}.apply_z_loss", f"{_LOSSES}:weight_z_loss"),
        COUNT_TOKENS_ONCE,
    ),
)
