"""Declares mtp-acceptance-rate."""

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
    summary="Log the acceptance rate of the MTP heads",
    upstream=(PullRequest(3458, native_since="0.19.0"),),
    problem=(
        "The MTP loss does not say whether the heads would speed up speculative decoding, and there is nothing else "
        "to see."
    ),
    adds=(
        "For each depth, the acceptance rate of the last step and of all steps of this process, in percent: in the "
        "log line, TensorBoard and W&B (`mtp_1_acceptance_rate`, `mtp_1_cumulative_acceptance_rate`).",
    ),
    repairs=(
        "Acceptance was counted after the loss, when TransformerEngine's fused cross entropy has put the gradient in "
        "the place of the logits: accepted tokens counted as rejected.",
        "float32 counters do not count beyond 2**24, which is 16.8 million tokens.",
        "Tensor parallelism took two collectives for each head and microbatch, and two more for each step; now one "
        "and one.",
        "Without `tp_group` it raised an error, although the output layer has the group.",
        "Rates were not reduced over the ranks when a CUDA graph replays the whole iteration.",
    ),
    refuses=("An interval over 1 with a CUDA graph of the whole iteration.",),
    numerics="None of training.",
    probe=Probe(f"{_HELPER}.save_metrics_to_tracker"),
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="mtp_acceptance_interval",
            type=int,
            default=1,
            doc="Measure the acceptance rate of the MTP heads in every N-th step (0: never).",
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
