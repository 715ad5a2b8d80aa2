"""Which patches the user wants, and what happens when one is refused."""

from __future__ import annotations

from collections.abc import Iterable

from .declare import PatchError
from .records import record

POLICIES = ("raise", "warn", "skip")
ALL, REPAIRS = PROFILES = ("all", "repairs")


@record
class Selection:
    """What the user has chosen: `ids`, and of these, with the profile 'repairs', only what repairs the library."""

    ids: frozenset[str]
    profile: str


def select(choice: str, ids: Iterable[str], variable: str) -> Selection:
    """Return what `choice` picks: 'all', 'repairs', 'none', 'id,id' (only these) or '-id,-id' (all but these).

    'all,-id' is '-id', and 'repairs,-id' the profile without `id`. `variable` is the environment variable that holds a
    choice.

    Raises:
        PatchError: an id that does not exist, ids to take mixed with ids to leave out, or commas alone.
    """
    ids = tuple(ids)
    words = [word.strip() for word in choice.split(",") if word.strip()]
    if not words and choice.strip():
        raise PatchError(f"{choice!r} names no patch; {variable} and apply() take {', '.join(PROFILES)}, none, or ids")
    profile = ALL
    if words[:1] in ([ALL], [REPAIRS]) and all(word.startswith("-") for word in words[1:]):
        profile, *words = words
    return Selection(_select_ids(choice, words, ids, variable), profile)


def _select_ids(choice: str, words: list[str], ids: tuple[str, ...], variable: str) -> frozenset[str]:
    if not words:
        return frozenset(ids)
    if len(words) > 1 and (alone := next((word for word in (*PROFILES, "none") if word in words), "")):
        raise PatchError(f"{choice!r} mixes {alone} with other words; write {alone} alone, or leave it out")
    if words == ["none"]:
        return frozenset()
    unknown = [word for word in words if word.removeprefix("-") not in ids]
    if unknown:
        import difflib  # in this case alone: the import of the package is to cost nothing

        close = difflib.get_close_matches(unknown[0].removeprefix("-").lower(), (*PROFILES, "none", *ids), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PatchError(
            f"unknown patch {', '.join(map(repr, unknown))}{hint}; {variable} and apply() take {', '.join(PROFILES)}, "
            f"none, or some of: {', '.join(ids)}"
        )
    left_out = {word[1:] for word in words if word.startswith("-")}
    if not left_out:
        return frozenset(words)
    if len(left_out) < len(set(words)):
        raise PatchError(f"{choice!r} mixes patches to take with patches to leave out (-id); write one kind only")
    return frozenset(ids) - left_out


def check_policy(on_drift: str, variable: str) -> str:
    """Return the policy `on_drift`; '' is the first of `POLICIES`. Raises PatchError for any other word.

    `variable` is the environment variable that holds a policy.
    """
    policy = on_drift.strip() or POLICIES[0]
    if policy not in POLICIES:
        words = ", ".join(POLICIES)
        raise PatchError(f"{variable} must be one of {words}, not {on_drift!r}")
    return policy
