"""The line with which a training of Megatron-LM's trainer says how many known defects affect it."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..engine.call import Call
from .diagnosis import diagnose

VARIABLE = "MEGATRON_MTP_PATCHES_DEFECTS"  # "off": no line
logger = logging.getLogger("megatron_mtp_patches")


def log_open_defects(call: Call) -> Any:
    """Wraps validate_args: rank 0 logs how many known defects affect the run and are not removed.

    What goes wrong in here is said in the log; it does not end a training.
    """
    validated = call.proceed()
    if os.environ.get("RANK", "0") == "0" and os.environ.get(VARIABLE) != "off":
        try:
            line = describe(call["args"])
        except Exception as error:
            line = f"known defects were not looked for: {type(error).__name__}: {error}"
        if line:
            logger.warning(line)
    return validated


def describe(arguments: object) -> str:
    """How many known defects affect a run with these arguments and are not removed, the most severe named.

    Nothing, '', if there are none.
    """
    findings = [finding for finding in diagnose([arguments], None) if not finding.is_removed]
    if not findings:
        return ""
    several = len(findings) > 1
    named = ", ".join(finding.id for finding in findings[:5]) + ", ..." * (len(findings) > 5)
    return (
        f"{len(findings)} known defect{'s affect' if several else ' affects'} this run (severity up to "
        f"{findings[0].severity} of 5: {named}); `megatron-mtp-patches doctor -- FLAGS` says what to do"
    )
