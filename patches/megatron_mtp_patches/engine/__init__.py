"""Applies declared patches: it knows Python modules and their source, and no Megatron.

What a declaration needs is imported here; the rest only once there is something to patch.
"""

from .declare import (
    AddArgument,
    AddField,
    AddFlag,
    AddIfMissing,
    Defect,
    Edit,
    Patch,
    PatchError,
    Probe,
    Provide,
    PullRequest,
    Replace,
    UsageError,
    Wrap,
)

__all__ = [
    "AddArgument",
    "AddField",
    "AddFlag",
    "AddIfMissing",
    "Defect",
    "Edit",
    "Patch",
    "PatchError",
    "Probe",
    "Provide",
    "PullRequest",
    "Replace",
    "UsageError",
    "Wrap",
]
