"""The settings of the patches that a user has set and that do not act: left out, in the wrong place, or misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..catalog import CATALOG, SETTINGS
from ..engine import AddField
from ..engine.similar_names import find_similar
from ..engine.state import State
from ..megatron_engine import ENGINE
from .places import Places

_BY_ID = {patch.id: patch for patch in CATALOG}
# {a setting: the id of the patch that adds it}
_PATCHES = {
    edit.field: patch.id for patch in CATALOG for edit in patch.edits if isinstance(edit, AddField) and edit in SETTINGS
}


def find_idle_settings(names: Iterable[object], section: str, places: Places) -> Iterator[str]:
    """Yield a sentence for each setting of the patches that does not act where it is set, with what to change.

    Whether a patch is left out is asked of the patches that are in force.

    Args:
        names: what is set in the section, settings of the patches or not.
        section: its name in the configuration; '' for the whole of it.
        places: those of this trainer.
    """
    for name in map(str, names):
        where = _join(section, name)
        if name not in _PATCHES:
            if similar := find_similar(name.replace("-", "_"), _PATCHES, cutoff=0.9):
                yield f"{where}: did you mean {_join(places.home_of(similar), similar)}?"
        elif name not in places.sections.get(section, ()):
            home = places.home_of(name)
            yield f"{where} is not read there" + (f": it belongs in {home}" if home else ", nor anywhere else here")
        else:
            reason = next(filter(None, map(_why_left_out, places.carriers.get(name, ()))), "")
            own_reason = _why_left_out(_PATCHES[name])
            if not reason and own_reason and not _is_megatrons_own(name):
                reason = own_reason
            if reason:
                yield f"{where} does not act: {reason}. Take that patch, or remove the setting"


def _why_left_out(patch: str) -> str:
    """That a patch is disabled or refused, and why; '' if it is neither."""
    report = ENGINE.report(_BY_ID[patch])
    if report.state in (State.DISABLED, State.REFUSED):
        return f"{patch}, which would read it, is {report.state}: {report.reason}"
    return ""


def _is_megatrons_own(name: str) -> bool:
    """True if this Megatron has the setting itself."""
    from megatron_overrides.settings.checks import configurations

    return any(name in vars(configuration)["__dataclass_fields__"] for configuration in configurations())


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name
