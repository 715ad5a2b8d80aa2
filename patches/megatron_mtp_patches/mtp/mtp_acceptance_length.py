"""Declares mtp-acceptance-length."""

from ..declarations.settings import TRANSFORMER_CONFIG, Setting, model_setting
from ..declarations.shared_edits import MTP_FORWARD_PASS, MTP_LOSS, MTP_TRACKER, SHOW_METRICS
from ..engine import Patch, Probe, Wrap

_TRAINING = "megatron.training.training"
_REPORT = "megatron_overrides.report.megatron_log"

PATCH = Patch(
    id="mtp-acceptance-length",
    summary="Log and validate the accepted length of speculative decoding with the MTP heads",
    problem="The acceptance rate compares each MTP head (Megatron's MTP layers) with the data. Speculative decoding "
    "compares it with the main model, and a head counts only if all heads before it were accepted. And validation "
    "reports nothing of the heads.",
    adds=(
        "`mtp acceptance length`: 1 plus the expected number of draft tokens that rejection sampling accepts, a mean "
        "over the positions of the product of the acceptances sum over v of min(p, q).",
        "`mtp greedy acceptance length`: the same for greedy verification, from the agreement with the main model's "
        "most likely token.",
        "Both are in the log line, in TensorBoard and in W&B. With `--mtp-loss-type` tv, kl, lk or e2e_tv they come "
        "from the pass that computes the loss. With cross entropy they need the main model's logits, and "
        "`--mtp-acceptance-length-interval N` measures them in every N-th step (0, the default: never).",
        "Megatron's own validation runs the heads and prints their losses and accepted lengths beside the validation "
        "loss; `--no-mtp-eval` turns that off.",
        "`megatron_mtp_patches.mtp_pass(compute=True)` does the same around any forward passes without gradients; "
        "`compute=False` skips the heads in forward passes with gradients.",
        "`mtp_pass(compute=True, labels=..., loss_mask=...)` gives the heads labels or a mask that the model is not "
        "given, as RL trainers need that compute their loss from logits.",
    ),
    undetected="It adds metrics; no number is wrong without it.",
    refuses=("`--mtp-acceptance-length-interval` N > 0 with a CUDA graph of the whole iteration.",),
    numerics="Training does not change. The lengths are means over the positions whose heads all count, summed in "
    "float64 over data- and context-parallel ranks.",
    unasked="Validation of Megatron-LM runs the MTP heads, and prints their losses and accepted lengths.",
    turned_off_by="`--no-mtp-eval`",
    probe=Probe(f"{TRANSFORMER_CONFIG}.mtp_acceptance_length_interval"),
    edits=(
        *model_setting(
            Setting(
                "mtp_acceptance_length_interval",
                int,
                0,
                "With cross entropy, measure the accepted length of the MTP heads in every N-th step (0: never).",
                unit="steps, or 0 for none",
                check="megatron_overrides.mtp.metrics.checks:check_cuda_graphs",
                in_ms_swift=True,
            )
        ),
        *model_setting(Setting("mtp_eval", bool, True, "Do not run the MTP heads in validation.")),
        *MTP_LOSS,
        *MTP_FORWARD_PASS,
        *MTP_TRACKER,
        *SHOW_METRICS,
        Wrap(f"{_TRAINING}:evaluate", f"{_REPORT}:measure_heads", check_source=False),
        Wrap(f"{_TRAINING}:evaluate_and_print_results", f"{_REPORT}:report_heads", check_source=False),
    ),
)
