"""The line at the start of a training of Megatron-LM: how many defects `doctor` finds, and how many are removed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from ..engine.call import Call
from .findings import diagnose_sources

VARIABLE = "MEGATRON_MTP_PATCHES_DEFECTS"  # "off": no line
logger = logging.getLogger("megatron_mtp_patches")


def log_known_defects(call: Call) -> Any:
    """Wraps validate_args: rank 0 logs how many known defects affect the run, and how many are removed from it.

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
    """Say how many known defects the patches remove from a run with these arguments, and how many they do not.

    The patches and the most severe defects are named. Nothing, '', if there are none.
    """
    findings = diagnose_sources([arguments], None)
    removed = [finding for finding in findings if finding.is_removed]
    open_defects = [finding for finding in findings if not finding.is_removed]
    parts = []
    if removed:
        verb = "defects are" if len(removed) > 1 else "defect is"
        patches = _name_first(dict.fromkeys(str(finding.patch) for finding in removed))
        parts.append(f"{len(removed)} known {verb} removed from this run (by {patches})")
    if open_defects:
        verb = "defects affect" if len(open_defects) > 1 else "defect affects"
        parts.append(
            f"{len(open_defects)} known {verb} this run (severity up to {open_defects[0].severity} of 5: "
            f"{_name_first(finding.id for finding in open_defects)})"
        )
        parts.append("`megatron-mtp-patches doctor -- FLAGS` says what to do")
    return "; ".join(parts)


def _name_first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
