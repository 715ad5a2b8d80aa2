"""What changes for a run between two Megatrons."""

from __future__ import annotations

from typing import Any, NamedTuple

from .reading import Reading

_OFF = ("None", "False", "0", "0.0", "inf", "''", "[]", "()", "{}")


class Change(NamedTuple):
    """A setting that one of two Megatrons has otherwise.

    Attributes:
        name: of the argument or field.
        part: what it configures: "model", "optimizer", "data parallelism" or "trainer".
        before: its value in the older Megatron; '' where that has no such setting.
        after: its value in the newer one; '' where that has no such setting.
        is_used: whether it may act in this run; not if it belongs to a feature that neither of the two uses.
    """

    name: str
    part: str
    before: str
    after: str
    is_used: bool = True

    @property
    def is_off(self) -> bool:
        """Whether it is new or gone, and does nothing."""
        return not (self.before and self.after) and (self.before or self.after) in _OFF


class Comparison(NamedTuple):
    """What changes for a run.

    Attributes:
        gone: the known defects that affect the run in the older Megatron only.
        new: those that affect it in the newer one only.
        shared: those that affect it in both, as in the newer one.
        unknown: the flags that the older one knows and the newer one does not.
        changed: the settings that both have, with another value.
        added: the settings that only the newer one has.
        dropped: the settings that only the older one has.
        superfluous: the ids of the patches that are applied in the older one and native in the newer one.
    """

    gone: list[dict[str, Any]]
    new: list[dict[str, Any]]
    shared: list[dict[str, Any]]
    unknown: list[str]
    changed: list[Change]
    added: list[Change]
    dropped: list[Change]
    superfluous: list[str]


def compare(before: Reading, after: Reading) -> Comparison:
    """Compare a run in two Megatrons."""
    old, new = ({one["id"]: one for one in reading.findings} for reading in (before, after))
    names = sorted(before.settings.keys() | after.settings.keys())
    changes = [_change(name, before, after) for name in names]
    return Comparison(
        gone=[one for name, one in old.items() if name not in new],
        new=[one for name, one in new.items() if name not in old],
        shared=[one for name, one in new.items() if name in old],
        unknown=[flag for flag in after.unknown if flag not in before.unknown],
        changed=[one for one in changes if one.before and one.after and one.before != one.after],
        added=[one for one in changes if not one.before],
        dropped=[one for one in changes if not one.after],
        superfluous=[
            name for name, state in after.patches.items() if state == "native" and before.patches.get(name) != state
        ],
    )


def _change(name: str, before: Reading, after: Reading) -> Change:
    values = [reading.settings.get(name, ("", "")) for reading in (before, after)]
    is_used = any(name in reading.settings and name not in reading.unused for reading in (before, after))
    return Change(name, values[1][1] or values[0][1], values[0][0], values[1][0], is_used)
