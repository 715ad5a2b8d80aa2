"""The settings of the patches that a user has set and that do not act: left out, in the wrong place, or misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..catalog import CATALOG, SETTINGS
from ..engine import AddField
from ..engine.similar_names import find_similar
from ..engine.state import State
from ..megatron_engine import ENGINE
from .places import Places, join

_BY_ID = {patch.id: patch for patch in CATALOG}
# {a setting: the id of the patch that adds it}
_PATCHES = {
    edit.field: patch.id for patch in CATALOG for edit in patch.edits if isinstance(edit, AddField) and edit in SETTINGS
}


def find_idle_settings(sections: Iterable[tuple[str, Iterable[object]]], places: Places) -> Iterator[str]:
    """Yield why settings of the patches do not act where they are set, with what to change.

    A sentence for each; the last one is for all that lack their patches, with the choice of patches that has them act.
    Whether a patch is left out is asked of the patches that are in force.

    Args:
        sections: the dotted name of each section of the configuration ('' for the whole of it) and what is set in it,
            settings of the patches or not.
        places: those of this trainer.
    """
    lacking: dict[str, list[str]] = {}  # {a setting, with its section: the patches that it lacks}
    for section, names in sections:
        for name in map(str, names):
            where = join(section, name)
            if name not in _PATCHES:
                if similar := find_similar(name.replace("-", "_"), _PATCHES, cutoff=0.9):
                    yield f"{where}: did you mean {join(places.home_of(similar, section), similar)}?"
            elif name in places.settings_in(section):
                if patches := _patches_that_are_left_out(name, places):
                    lacking[where] = patches
            elif any(name in settings for settings in places.sections.values()):
                home = places.home_of(name, section) or "the outermost section"
                yield f"{where} is not read there: it belongs in {home}"
            else:
                yield f"{where} does not act in {places.why_others_are_idle}: take it out"
    if lacking:
        yield _name_patches(lacking)


def find_settings_without_heads(names: Iterable[str], acting: Iterable[str], why: str) -> Iterator[str]:
    """Yield one sentence for the settings among `names` that act on MTP heads alone, of which none trains.

    Args:
        acting: those that act all the same.
        why: no head trains.
    """
    if idle := sorted({name for name in names if name in _PATCHES and "mtp" in name}.difference(acting)):
        yield f"{', '.join(idle)}: no effect, because {why}"


def _patches_that_are_left_out(name: str, places: Places) -> list[str]:
    """The patches without which a setting does not act, of those that are disabled or refused."""
    left_out = [patch for patch in places.carriers.get(name, ()) if _is_left_out(patch)]
    if _is_left_out(_PATCHES[name]) and not _is_megatrons_own(name):
        left_out.append(_PATCHES[name])
    return left_out


def _name_patches(lacking: dict[str, list[str]]) -> str:
    """One sentence for all settings whose patches are left out, with the choice that takes them."""
    patches = list(dict.fromkeys(patch for some in lacking.values() for patch in some))
    refused = [patch for patch in patches if ENGINE.report(_BY_ID[patch]).state is State.REFUSED]
    verb, what = ("does", "that setting") if len(lacking) == 1 else ("do", "these settings")
    text = f"{', '.join(lacking)} {verb} not act without {', '.join(patches)}"
    if refused:
        return f"{text}: {ENGINE.report(_BY_ID[refused[0]]).reason}. Take {what} out"
    variable = ENGINE.project.choice_variable
    return f"{text}, left out by {variable}: set {variable}={ENGINE.choice_with(patches)}, or take {what} out"


def _is_left_out(patch: str) -> bool:
    return ENGINE.report(_BY_ID[patch]).state in (State.DISABLED, State.REFUSED)


def _is_megatrons_own(name: str) -> bool:
    """True if this Megatron has the setting itself."""
    from megatron_overrides.settings.checks import configurations

    return any(name in vars(configuration)["__dataclass_fields__"] for configuration in configurations())
