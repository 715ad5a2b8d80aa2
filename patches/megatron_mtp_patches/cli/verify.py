"""Run a training script up to its first step, and see which parameters the MTP loss trains."""

from __future__ import annotations

import sys

from .. import _engine
from ..engine import Patch, PatchError, Wrap
from .run import run_script

_WRAPPERS = "megatron_mtp_patches.cli.verify_wrappers"

VERIFICATION = Patch(
    id="verify-mtp",
    summary="Run a first step in which only the MTP loss has a gradient",
    edits=(
        Wrap(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            f"{_WRAPPERS}:silence_main_loss",
            check_source=False,
        ),
        Wrap(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            f"{_WRAPPERS}:report_after_schedule",
            check_source=False,
        ),
        Wrap(
            "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
            f"{_WRAPPERS}:count_positions",
            check_source=False,
        ),
    ),
)


def verify(script: str, arguments: list[str], device: str | None) -> None:
    """Run `script`; ends with SystemExit 0 or 1 in its first step, on every rank.

    A script that calls `megatron_mtp_patches.revert()` takes the verification out too, until it calls `apply()`.

    Raises:
        PatchError: the script ended before it, whatever its exit code.
    """
    _engine.add_base(VERIFICATION)
    code: object = 0
    try:
        run_script(script, arguments, device)
    except SystemExit as ended:
        loaded = sys.modules.get(_WRAPPERS)  # by Megatron's schedules
        if loaded and isinstance(ended, loaded.VerificationExit):
            raise
        code = ended.code or 0
    raise PatchError(
        f"verify-mtp: {script} ended (exit code {code}) without a training step through Megatron's schedules, "
        f"or, over a frozen main model, without an update of the heads and a step after it: nothing is verified"
    )
