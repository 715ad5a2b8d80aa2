"""A run that goes on from a checkpoint says with which patches and settings it differs from the run that saved it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from .. import record
from ..catalog import SETTINGS
from ..engine.call import Call
from ..engine.state import State
from .provenance import states_in

RECORD = "megatron_mtp_patches"  # its name among Megatron's arguments
logger = logging.getLogger("megatron_mtp_patches")


def warn_of_differences(call: Call) -> Any:
    """Wraps check_checkpoint_args(checkpoint_args, ...): Megatron compares those of a checkpoint that a run resumes."""
    if os.environ.get("RANK", "0") == "0":
        from megatron.training.global_vars import get_args

        if text := describe_differences(vars(call["checkpoint_args"]), {**vars(get_args()), RECORD: record()}):
            logger.warning(text)
    return call.proceed()


def describe_differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Describe how the patches and their settings differ; '' where they do not.

    Args:
        saved: Megatron's arguments in the checkpoint, by name, with the record of the patches if it has one.
        present: those of this run, with its record.
    """
    if RECORD not in saved:
        return (
            "The checkpoint was saved without megatron_mtp_patches; this run goes on with them "
            "(docs/upgrade.md#add-or-remove-patches-in-the-middle-of-a-run says what that changes)"
        )
    parts = []
    for setting in SETTINGS.values():
        before, now = (values.get(setting.name, setting.default) for values in (saved, present))
        if before != now:
            parts.append(f"--{setting.name.replace('_', '-')} was {before!r} and is {now!r}")
    before, now = (states_in(values[RECORD]) for values in (saved, present))
    for title, one, other in (("left out now", before, now), ("left out then", now, before)):
        active = [id for id, state in one.items() if state in (State.APPLIED, State.REPAIRED, State.NATIVE)]
        names = [id for id in active if other.get(id) is State.DISABLED]
        if names:
            parts.append(f"{title}: {', '.join(names)}")
    if not parts:
        return ""
    return f"The checkpoint was saved by a run with other patches or settings: {'; '.join(parts)}"
