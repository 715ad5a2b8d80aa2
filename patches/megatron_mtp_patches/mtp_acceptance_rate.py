"""Log how many tokens the MTP heads guess right.

Upstream: NVIDIA/Megatron-LM#3458, native since 0.19.0.
Without it: the MTP loss is all there is to see; whether the heads would speed up speculative decoding, nobody knows.
Adds: per depth, in percent, the acceptance rate of the last step and of all steps of this process, in the log line,
    TensorBoard and W&B (`mtp_1_acceptance_rate`, `mtp_1_cumulative_acceptance_rate`).
    `--mtp-acceptance-interval N` counts in every N-th step only (default 1); 0 never counts and costs nothing.
Repairs, where native: counted after the loss, when TransformerEngine's fused cross entropy has put the gradient in the
    place of the logits, so that right guesses counted as wrong;
    counted in float32, which cannot count beyond 2**24;
    two collectives for each head and microbatch under tensor parallelism, two more for each step: now one and one;
    without `tp_group` an error, where the group of the output layer is at hand;
    not reduced over the ranks when a CUDA graph replays the whole iteration.
Changes numbers: of training, none.
"""

from .engine import AddField, Patch, Probe, Provide, PullRequest, Replace
from .shared_edits import (
    CHECK_TRANSFORMER_CONFIG,
    DEFAULT_IN_YAML,
    MTP,
    MTP_LOSS,
    MTP_OVERRIDES,
    SHOW_METRICS,
    TRANSFORMER_CONFIG,
)

_HELPER = f"{MTP}:MTPLossLoggingHelper"
_OURS = f"{MTP_OVERRIDES}.tracker:MTPLossLoggingHelper"
_NEW = ("save_metrics_to_tracker", "clean_metrics_in_tracker", "reduce_metrics_in_tracker")
_OLD = ("save_loss_to_tracker", "clean_loss_in_tracker", "reduce_loss_in_tracker")
_COUNTING = ("_mtp_logits_are_vocab_sharded", "_vocab_parallel_argmax", "_compute_mtp_acceptance_counts")

PATCH = Patch(
    id="mtp-acceptance-rate",
    doc=__doc__,
    upstream=(PullRequest(3458, native_since="0.19.0"),),
    probe=Probe(f"{_HELPER}.save_metrics_to_tracker"),
    repairs=True,
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="mtp_acceptance_interval",
            type=int,
            default=1,
            doc="Count the acceptance of the MTP heads in every N-th step; 0: never.",
        ),
        DEFAULT_IN_YAML,
        CHECK_TRANSFORMER_CONFIG,
        *(Provide(f"{MTP}:{name}", f"{MTP_OVERRIDES}.acceptance:{name}") for name in _COUNTING),
        *(Provide(f"{_HELPER}.{name}", f"{_OURS}.{name}") for name in (*_NEW, *_OLD)),
        Replace(f"{_HELPER}.track_mtp_metrics", f"{_OURS}.track_mtp_metrics"),
        *MTP_LOSS,
        *SHOW_METRICS,
    ),
)
