"""Applies declared patches: it knows Python modules and their source. A `Project` names their owner and the library.

What a declaration needs is imported here; the rest only once there is something to patch.
"""

from .declare import (
    AddArgument,
    AddField,
    AddFlag,
    AddIfMissing,
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
from .project import Project

__all__ = [
    "AddArgument",
    "AddField",
    "AddFlag",
    "AddIfMissing",
    "Edit",
    "Patch",
    "PatchError",
    "Probe",
    "Project",
    "Provide",
    "PullRequest",
    "Replace",
    "UsageError",
    "Wrap",
]
