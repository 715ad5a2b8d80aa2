"""Run a training script up to its first step, and see which parameters the MTP loss trains."""

from __future__ import annotations

import sys

from ..engine import PatchError
from ..megatron_engine import ENGINE
from ..mtp.verification import FIRST_STEP, LISTENING
from .run import run_script


def verify(script: str, arguments: list[str], device: str | None, is_module: bool = False) -> None:
    """Run `script`, or with `is_module` the module of this name; exits with 0 or 1 in its first step, on every rank.

    A script that calls `megatron_mtp_patches.revert()` takes the verification out too, until it calls `apply()`.

    Raises:
        PatchError: the script ended before it, whatever its exit code.
    """
    ENGINE.add_base(LISTENING)
    ENGINE.add_base(FIRST_STEP)
    code: object = 0
    try:
        run_script(script, arguments, device, is_module)
    except SystemExit as ended:
        loaded = sys.modules.get("megatron_mtp_patches.mtp.verification.first_step")  # by Megatron's schedules
        if loaded and isinstance(ended, loaded.VerificationExit):
            raise
        code = ended.code or 0
    raise PatchError(
        f"verify-mtp: {script} ended (exit code {code}) without a training step through Megatron's schedules, "
        f"or, over a frozen main model, without an update of the heads and a step after it: nothing is verified. Has a "
        f"checkpoint that it loads reached --train-iters?"
    )
