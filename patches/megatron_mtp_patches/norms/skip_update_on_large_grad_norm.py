"""Declares skip-update-on-large-grad-norm."""

from math import inf

from ..declarations.settings import OPTIMIZER_CONFIG, Setting, optimizer_setting
from ..declarations.shared_edits import MTP, OPTIMIZER_STEP, SHOW_METRICS
from ..engine import Patch, Probe, PullRequest, Wrap

PATCH = Patch(
    id="skip-update-on-large-grad-norm",
    summary="Skip the update when the gradient norm is too large",
    upstream=(PullRequest(3460, native_since="0.18.0"),),
    problem="One bad batch or one flipped bit takes a full, clipped step in a wrong direction, and stays in Adam's "
    "moments for a hundred steps. On a small GPT 24 batches of compressed bytes raise the mean training loss on "
    "text from 2.58 to 2.63 bits per byte.",
    adds=(
        "`OptimizerConfig.grad_norm_skip_threshold`.",
        "A skipped step leaves parameters, optimizer state and learning rate schedule unchanged. It is counted, "
        "logged as a warning on rank 0, and shown in the training log, TensorBoard and W&B.",
    ),
    repairs=(
        "A rank that owns no main parameters did not skip while the others did: they hung or diverged.",
        "A step with a NaN norm was applied (0.18.2, 0.19.2, main).",
        "An infinite threshold cost a host-device sync in each step (0.18.2).",
        "Megatron-FSDP, a bare DistributedOptimizer, Float16 or FP32 optimizer and MimoOptimizer ignored the "
        "threshold.",
        "MimoOptimizer lost the NaN of a module; before 0.19 its ranks could disagree on whether the update was done.",
        "Gradients were clipped in the attribute that the configuration names, not in the one that holds them. A "
        "precision-aware optimizer with fp8 other than delayed scaling was never clipped: in MimoOptimizer, and in "
        "Megatron-FSDP before 0.18.",
        "QK clipping rescaled weights after a skipped step.",
        "The mean of the MTP losses in the log line counted skipped steps in its sum but not in its number.",
    ),
    refuses=("A finite threshold together with `--optimizer-cuda-graph`.",),
    numerics="With a finite threshold, and in the two precision-aware cases above, which are clipped now. Without a "
    "threshold: after a step that the loss scaler skipped, QK clipping no longer rescales weights, and the logged "
    "MTP loss leaves the step out.",
    unasked="After a step that the loss scaler of fp16 skips, QK clipping leaves the weights as they are, and the "
    "logged MTP loss leaves the step out. Gradients of a precision-aware optimizer with fp8 other than delayed scaling "
    "are clipped in MimoOptimizer, and before 0.18 in Megatron-FSDP.",
    probe=Probe(f"{OPTIMIZER_CONFIG}.grad_norm_skip_threshold"),
    edits=(
        *optimizer_setting(
            Setting(
                "grad_norm_skip_threshold",
                float,
                inf,
                "Skip the whole update when the gradient norm, before clipping, exceeds this or is NaN (inf: "
                "never skip).",
                check="megatron_overrides.norms.checks:check_threshold",
                is_upstream=True,
            )
        ),
        *OPTIMIZER_STEP,
        Wrap("megatron.core.optimizer.qk_clip:clip_qk", "megatron_overrides.muon.qk_clip.clipping:clip_after_update"),
        Wrap(
            f"{MTP}:MTPLossLoggingHelper.track_mtp_metrics",
            "megatron_overrides.mtp.metrics.logged_losses:leave_out_skipped_step",
            check_source=False,
        ),
        *SHOW_METRICS,
    ),
)
