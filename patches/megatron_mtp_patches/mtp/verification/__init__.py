"""The parameters that the MTP loss trains, seen in a step in which only that loss has a gradient.

`megatron-mtp-patches verify-mtp` asks in the first step of a script, `megatron_mtp_patches.verify` in a running
process. The idea is slime's check for "only .mtp. gradients" (THUDM/slime), for all that trains with Megatron's
schedules.
"""

from ...engine import Patch, Wrap

_STEP = "megatron_mtp_patches.mtp.verification.mtp_step"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

LISTENING = Patch(
    id="verify",
    summary="Make steps possible in which only the MTP loss has a gradient",
    edits=(
        Wrap(f"{_SCHEDULES}:forward_step_calc_loss", f"{_STEP}:silence_main_loss", check_source=False),
        Wrap(
            "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
            f"{_STEP}:count_positions",
            check_source=False,
        ),
    ),
)
FIRST_STEP = Patch(
    id="verify-mtp",
    summary="Run a first step in which only the MTP loss has a gradient",
    edits=(
        Wrap(
            f"{_SCHEDULES}:get_forward_backward_func",
            "megatron_mtp_patches.mtp.verification.first_step:report_after_schedule",
            check_source=False,
        ),
    ),
)
