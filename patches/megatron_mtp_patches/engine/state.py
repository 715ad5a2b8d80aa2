"""The words for what becomes of a patch, and of each of its targets: everything that speaks of them uses these."""

from enum import Enum


class State(str, Enum):
    """The state of a patch. A decision may be applied or repaired before the modules of the patch are imported."""

    PENDING = "pending"  # what it edits is not installed, or not imported yet
    APPLIED = "applied"  # this release lacks the change
    REPAIRED = "repaired"  # this release has the change, with defects that the patch removes
    NATIVE = "native"  # this release has the change, and the patch does nothing
    DISABLED = "disabled"  # the user left it out
    REFUSED = "refused"  # it cannot be applied here

    __str__ = str.__str__


class TargetState(str, Enum):
    """The state of one target of a patch."""

    PENDING = "pending"
    APPLIED = "applied"
    CHANGED = "applied, then changed by another library"
    ABSENT = "absent here"
    UNTOUCHED = "untouched"  # the patch is not installed

    __str__ = str.__str__
