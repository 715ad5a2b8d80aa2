"""The settings of the patches that a user has set and that do not act: left out, in the wrong place, or misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..catalog import CATALOG, SETTINGS
from ..declarations.places import Places
from ..engine import AddField, Patch
from ..engine.similar_names import find_similar
from ..engine.state import State
from ..megatron_engine import ENGINE

_PATCHES = {
    edit.field: patch for patch in CATALOG for edit in patch.edits if isinstance(edit, AddField) and edit in SETTINGS
}


def find_idle_settings(names: Iterable[object], section: str, places: Places) -> Iterator[str]:
    """Yield a sentence for each setting of the patches that does not act where it is set, with what to change.

    Whether a patch is left out is asked of the patches that are in force.

    Args:
        names: what is set in the section, settings of the patches or not.
        section: its name in the configuration; '' for the whole of it.
        places: the sections in which this trainer's configuration has settings of the patches.
    """
    for name in map(str, names):
        where = _join(section, name)
        if name not in _PATCHES:
            if similar := find_similar(name.replace("-", "_"), _PATCHES, cutoff=0.9):
                yield f"{where}: did you mean {_join(_home(similar, places), similar)}?"
        elif name not in places.get(section, ()):
            home = _home(name, places)
            yield f"{where} is not read there" + (f": it belongs in {home}" if home else ", nor anywhere else here")
        elif reason := why_left_out(_PATCHES[name]):
            yield f"{where} does not act: {reason}. Take that patch, or remove the setting"


def why_left_out(patch: Patch) -> str:
    """That a patch is disabled or refused, and why; '' if it is neither."""
    report = ENGINE.report(patch)
    if report.state in (State.DISABLED, State.REFUSED):
        return f"{patch.id}, which would read it, is {report.state}: {report.reason}"
    return ""


def _home(name: str, places: Places) -> str:
    return next((section for section, names in places.items() if name in names), "")


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
