"""Declares skip-updates-in-verl."""

from ..engine import Patch, Wrap

_OVERRIDES = "megatron_overrides.frameworks.verl"
_WORKERS = "verl.workers"

PATCH = Patch(
    id="skip-updates-in-verl",
    summary="Let verl continue after a skipped update, and report the metrics of the patches",
    package="verl",
    problem="verl's Megatron engine ends the run with `NotImplementedError: Megatron optimizer step failed. This "
    "should not happen` as soon as an update is skipped: by `grad_norm_skip_threshold`, which Megatron has since "
    "0.18, or by the loss scaler of fp16.",
    adds=(
        "After a skipped update verl continues with the next batch, and reports its gradient norm.",
        "verl's metrics get `megatron/mtp_grad_norm`, `megatron/updates_skipped_for_grad_norm` and the like.",
        "With `mtp.enable_train=false` verl loads MTP heads (Megatron's MTP layers) and does not train them. A line in "
        "the log names the settings of heads that act on nothing then, or says that the heads of a HybridModel train. "
        "Where they do not train, the metrics have no `megatron/mtp_grad_norm`.",
    ),
    undetected="Only runs under verl have the defect, and it ends them with an error.",
    numerics="Nothing changes in a run that skips no update.",
    unasked="verl goes on after a skipped update, which ends it otherwise, and its metrics have those of the patches.",
    notes=(
        "It patches verl. If the package is not installed, the patch is pending.",
        "verl's learning rate schedule counts training batches, so a skipped update does not hold it back, as it does "
        "in Megatron-LM.",
    ),
    edits=(
        Wrap(
            f"{_WORKERS}.engine.megatron.transformer_impl:MegatronEngine.optimizer_step",
            f"{_OVERRIDES}:return_from_skipped_update",
        ),
        Wrap(f"{_WORKERS}.engine_workers:TrainingWorker._postprocess_output", f"{_OVERRIDES}:report_metrics"),
        Wrap("verl.utils.megatron_utils:patch_engine_mtp", f"{_OVERRIDES}:name_trained_heads", check_source=False),
    ),
)
