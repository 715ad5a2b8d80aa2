"""The patches that the user wants, and the policy when one is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .declare import PatchError
from .project import Project
from .similar_names import did_you_mean

POLICIES = ("raise", "warn", "skip")
ALL, REPAIRS = PROFILES = ("all", "repairs")
NONE = "none"


@dataclass(frozen=True)
class Selection:
    """The user's choice: `ids`, those among them that he has `named`, and the profile.

    With the profile 'repairs' only repairs and what is named are taken.
    """

    ids: frozenset[str]
    profile: str
    named: frozenset[str] = frozenset()


def select(choice: str, ids: Iterable[str], project: Project) -> Selection:
    """Return what `choice` picks: 'all', 'repairs', 'none', 'id,id' (only these) or '-id,-id' (all but these).

    'all,-id' is '-id', and 'repairs,id,-id' the profile with the first patch and without the second.

    Raises:
        PatchError: an id that does not exist, ids to take mixed with ids to leave out, or commas alone.
    """
    ids = tuple(ids)
    words = [word.strip() for word in choice.split(",") if word.strip()]
    if not words and choice.strip():
        raise PatchError(f"{choice!r} names no patch; {_possible_words(project)}")
    if words == [NONE]:
        return Selection(frozenset(), ALL)
    profile = ALL
    if words[:1] == [REPAIRS] or (words[:1] == [ALL] and all(word.startswith("-") for word in words[1:])):
        profile, *words = words
    if misplaced := next((word for word in (*PROFILES, NONE) if word in words), ""):
        place = "first" if misplaced == REPAIRS else "alone"
        raise PatchError(f"{choice!r} mixes {misplaced} with other words; write {misplaced} {place}, or leave it out")
    _refuse_unknown(words, ids, project)
    taken = frozenset(word for word in words if not word.startswith("-"))
    left_out = frozenset(word[1:] for word in words if word.startswith("-"))
    if taken & left_out or (profile == ALL and taken and left_out):
        raise PatchError(f"{choice!r} mixes patches to take with patches to leave out (-id); write one kind only")
    if profile == REPAIRS:
        return Selection(frozenset(ids) - left_out, profile, taken)
    return Selection(taken or frozenset(ids) - left_out, profile, taken)


def extend(selection: Selection, patches: Iterable[str], ids: Iterable[str]) -> str:
    """Return a choice, as `select` takes it from `ids`, that picks what `selection` does and these patches."""
    named = selection.named | frozenset(patches)
    left_out = [f"-{id}" for id in sorted({*ids} - selection.ids - named)]
    if selection.profile == REPAIRS:
        words = [REPAIRS, *sorted(named), *left_out]
    elif selection.named or not selection.ids:
        words = sorted(named)
    else:
        words = left_out or [ALL]
    return ",".join(words)


def _refuse_unknown(words: list[str], ids: tuple[str, ...], project: Project) -> None:
    unknown = [word for word in words if word.removeprefix("-") not in ids]
    if unknown:
        hint = did_you_mean(unknown[0].removeprefix("-"), (*PROFILES, NONE, *ids))
        if len(unknown[0].split()) > 1:
            hint = " (commas, not spaces, separate ids)"
        raise PatchError(f"unknown patch {', '.join(map(repr, unknown))}{hint}; {_possible_words(project)}")


def _possible_words(project: Project) -> str:
    return (
        f"{project.choice_variable} and apply() take {', '.join(PROFILES)}, {NONE}, or ids of patches: "
        f"`{project.command} status`, without this choice, lists them"
    )


def check_policy(on_drift: str, variable: str) -> str:
    """Return the policy `on_drift`; '' is the first of `POLICIES`. Raises PatchError for any other word.

    `variable` is the environment variable that holds a policy.
    """
    policy = on_drift.strip() or POLICIES[0]
    if policy not in POLICIES:
        words = ", ".join(POLICIES)
        raise PatchError(f"{variable} must be one of {words}, not {on_drift!r}")
    return policy
