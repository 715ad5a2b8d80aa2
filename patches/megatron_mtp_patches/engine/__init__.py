"""Applies declared patches: it knows Python modules and their source. A `Project` names their owner and the library.

What a declaration needs is imported here; the rest only once there is something to patch.
"""

from .declare import (
    AddArgument,
    AddField,
    AddFlag,
    Edit,
    Override,
    Patch,
    PatchError,
    Probe,
    PullRequest,
    UsageError,
    Wrap,
)
from .project import Project

__all__ = [
    "AddArgument",
    "AddField",
    "AddFlag",
    "Edit",
    "Override",
    "Patch",
    "PatchError",
    "Probe",
    "Project",
    "PullRequest",
    "UsageError",
    "Wrap",
]
