"""A run that goes on from a checkpoint says with which patches and settings it differs from the run that saved it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from .catalog import CATALOG
from .engine import AddField
from .engine.call import Call
from .provenance import states_in
from .settings import Setting

SETTINGS = [
    edit.setting
    for patch in CATALOG
    for edit in patch.edits
    if isinstance(edit, AddField) and isinstance(edit.setting, Setting)
]
ACTIVE = ("applied", "repaired", "native")
logger = logging.getLogger("megatron_mtp_patches")


def warn_of_differences(call: Call) -> Any:
    """Wraps check_checkpoint_args, which Megatron's trainer calls before it loads a checkpoint to go on from."""
    if os.environ.get("RANK", "0") == "0":
        from megatron.training.global_vars import get_args

        if text := describe_differences(vars(call["checkpoint_args"]), vars(get_args())):
            logger.warning(text)
    return call.proceed()


def describe_differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Describe how the patches and their settings differ; '' where they do not.

    Args:
        saved: Megatron's arguments in the checkpoint, by name, with the record of the patches if it has one.
        present: those of this run.
    """
    if "megatron_mtp_patches" not in saved:
        return (
            "The checkpoint was saved without megatron_mtp_patches; this run goes on with them "
            "(docs/upgrade.md#add-or-remove-patches-in-the-middle-of-a-run says what that changes)"
        )
    parts = []
    for setting in SETTINGS:
        before, now = (values.get(setting.name, setting.default) for values in (saved, present))
        if before != now:
            parts.append(f"--{setting.name.replace('_', '-')} was {before!r} and is {now!r}")
    before, now = (states_in(values["megatron_mtp_patches"]) for values in (saved, present))
    for title, one, other in (("left out now", before, now), ("left out then", now, before)):
        names = [id for id, state in one.items() if state in ACTIVE and other.get(id) == "disabled"]
        if names:
            parts.append(f"{title}: {', '.join(names)}")
    if not parts:
        return ""
    return f"The checkpoint was saved by a run with other patches or settings: {'; '.join(parts)}"
