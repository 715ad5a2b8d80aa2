"""Skip the update of a step whose gradient norm is too large.

Upstream: NVIDIA/Megatron-LM#3460, native since 0.18.0 (as a configuration field; upstream has no flag for it).
Without it: one bad batch or one flipped bit takes a full, clipped step in a wrong direction and stays in Adam's
    moments for a hundred steps.
Adds: `OptimizerConfig.grad_norm_skip_threshold` and `--grad-norm-skip-threshold X` (default inf: never skip). A
    skipped step leaves parameters, optimizer state and learning rate schedule as they were; it is counted, logged as
    a warning on rank 0, and shown in the training log, TensorBoard and W&B.
Repairs, where native:
    a rank that owns no main parameters did not skip while the others did (hang or diverged weights);
    a NaN norm was applied (0.18.2, 0.19.2, main);
    an infinite threshold read the norm on the host each step (0.18.2);
    Megatron-FSDP, a bare DistributedOptimizer, Float16 or FP32 optimizer and MimoOptimizer ignored the threshold;
    MimoOptimizer lost the NaN of a module, and before 0.19 its ranks could disagree on whether the update was done;
    gradients were clipped in the attribute that the configuration names, not the one that holds them: precision-aware
    with fp8 other than delayed scaling was never clipped in MimoOptimizer, nor in Megatron-FSDP before 0.18;
    QK clipping rescaled weights after a skipped step;
    the log line's mean of the MTP losses counted skipped steps in its sum but not in its number.
Refused at start: a finite threshold together with --optimizer-cuda-graph.
Changes numbers: with a finite threshold; and in the two precision-aware cases above, which are clipped now.
"""

from math import inf

from .engine import Patch, Probe, PullRequest, Wrap
from .shared_edits import (
    CHECK_SETTINGS,
    MTP,
    MTP_OVERRIDES,
    OPTIMIZER_CONFIG,
    OPTIMIZER_STEP,
    SHOW_METRICS,
    add_optimizer_setting,
)

_HELP = "Skip the update of a step whose gradient norm, before clipping, is larger than this or NaN."

PATCH = Patch(
    id="skip-update-on-large-grad-norm",
    doc=__doc__,
    upstream=(PullRequest(3460, native_since="0.18.0"),),
    probe=Probe(f"{OPTIMIZER_CONFIG}.grad_norm_skip_threshold"),
    repairs=True,
    edits=(
        *add_optimizer_setting("grad_norm_skip_threshold", float, inf, _HELP),
        *CHECK_SETTINGS,
        *OPTIMIZER_STEP,
        Wrap(
            "megatron.core.optimizer.qk_clip:clip_qk",
            "megatron_overrides.core.optimizer.qk_clip:clip_after_update",
        ),
        Wrap(
            f"{MTP}:MTPLossLoggingHelper.track_mtp_metrics",
            f"{MTP_OVERRIDES}.skipped_steps:leave_out_skipped_step",
            check_source=False,
        ),
        *SHOW_METRICS,
    ),
)
