"""Declares scale-sparse-indexer-loss."""

from ..engine import Patch, Probe, PullRequest, Wrap

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

PATCH = Patch(
    id="scale-sparse-indexer-loss",
    summary="Scale the loss of the sparse attention's indexer as the main loss",
    upstream=(PullRequest(4070, native_since="0.19.0"), PullRequest(5244, native_since="0.19.0")),
    problem="With `--experimental-attention-variant dsa` and `--dsa-indexer-loss-coeff`, nothing scales the indexer's "
    "loss on 0.18. It is not divided by the number of microbatches, nor multiplied by the loss scale of fp16. With N "
    "microbatches the indexer's gradients are N times too large.",
    adds=("The schedules set the scale of the indexer's loss for each microbatch, as they do for MoE losses.",),
    numerics="Only with the indexer's loss, and several microbatches or fp16: the indexer's gradients, and the "
    "gradient norm with them. A coefficient that was tuned for one number of microbatches keeps its effect only if "
    "it is multiplied by that number.",
    is_repair=True,
    probe=Probe(f"{_SCHEDULES}:forward_step_calc_loss", contains="experimental_attention_variant_loss_scale_func"),
    edits=(
        Wrap(f"{_SCHEDULES}:forward_step_calc_loss", "megatron_overrides.attention.indexer_loss:scale_indexer_loss"),
    ),
)
