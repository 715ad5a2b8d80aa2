"""Declares mtp-acceptance-rate."""

from ..declarations.settings import Setting, model_setting
from ..declarations.shared_edits import MTP, MTP_LOSS, MTP_TRACKER, SHOW_METRICS
from ..engine import Override, Patch, Probe, PullRequest

_HELPER = f"{MTP}:MTPLossLoggingHelper"
_COUNTING = {
    "_mtp_logits_are_vocab_sharded": "losses.vocabulary",
    "_vocab_parallel_argmax": "losses.vocabulary",
    "_compute_mtp_acceptance_counts": "metrics.acceptance",
}

PATCH = Patch(
    id="mtp-acceptance-rate",
    summary="Log the acceptance rate of the MTP heads",
    upstream=(PullRequest(3458, native_since="0.19.0"),),
    problem="The MTP loss does not say whether the MTP heads (Megatron's MTP layers) would speed up speculative "
    "decoding, and there is nothing else to see.",
    adds=(
        "The acceptance rate of each head: how often its most likely token is the label, in percent of the positions "
        "that its loss counts.",
        "It is in the log line, and under upstream's names in TensorBoard and W&B: `mtp_1_acceptance_rate` (this "
        "step) and `mtp_1_cumulative_acceptance_rate` (since this process started).",
        "`save_loss_to_tracker`, `clean_loss_in_tracker`, `reduce_loss_in_tracker` and the key `values` of older "
        "releases still work.",
    ),
    repairs=(
        "Acceptance was counted after the loss. TransformerEngine's fused cross entropy (up to 2.17) overwrites the "
        "logits with their gradient, in which the label is the least likely token, so correct predictions counted as "
        "wrong.",
        "Counters were float32 numbers, which are rounded above 2^24 = 16.8 million.",
        "Tensor parallelism took two collectives for each head and microbatch, and two more for each step. Now it "
        "takes one and one.",
        "Counting without `tp_group` raised an error, although the output layer has the group.",
        "When a CUDA graph replayed the whole iteration, rates were no longer reduced over the ranks.",
    ),
    refuses=("`--mtp-acceptance-interval` N > 1 with a CUDA graph of the whole iteration.",),
    numerics="Training does not change. Counts are exact integers, the same on every tensor-parallel rank and added "
    "over data- and context-parallel ranks.",
    unasked="The log has the acceptance rate of each MTP head.",
    turned_off_by="`--mtp-acceptance-interval 0`",
    notes=(
        "Megatron's trainer of 0.19 and main refuses `--cross-entropy-fusion-impl te`, so `doctor` finds the first "
        "defect in the configurations of other trainers only.",
    ),
    probe=Probe(f"{_HELPER}.save_metrics_to_tracker"),
    edits=(
        *model_setting(
            Setting(
                "mtp_acceptance_interval",
                int,
                1,
                "Measure the acceptance rate of the MTP heads in every N-th step (0: never).",
                unit="steps, or 0 for none",
                check="megatron_overrides.mtp.metrics.checks:check_cuda_graphs",
                in_ms_swift=True,
            )
        ),
        *(
            Override(f"{MTP}:{name}", f"megatron_overrides.mtp.{module}:{name}", where="everywhere")
            for name, module in _COUNTING.items()
        ),
        *MTP_TRACKER,
        *MTP_LOSS,
        *SHOW_METRICS,
    ),
)
