"""Which patches the user wants, and what happens when one is refused."""

from __future__ import annotations

from collections.abc import Iterable

from .declare import PatchError

POLICIES = ("raise", "warn", "skip")


def select(choice: str, ids: Iterable[str]) -> frozenset[str]:
    """The ids that `choice` picks: 'all', 'none', 'id,id' (only these) or '-id,-id' (all but these).

    Raises:
        PatchError: an id that does not exist, or ids to take mixed with ids to leave out.
    """
    ids = tuple(ids)
    words = [word.strip() for word in choice.split(",") if word.strip()]
    if words in ([], ["all"]):
        return frozenset(ids)
    if words == ["none"]:
        return frozenset()
    unknown = [word for word in words if word.removeprefix("-") not in ids]
    if unknown:
        import difflib  # in this case alone: the import of the package is to cost nothing

        close = difflib.get_close_matches(unknown[0].removeprefix("-").lower(), ("all", "none", *ids), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PatchError(
            f"unknown patch {', '.join(map(repr, unknown))}{hint}; MEGATRON_MTP_PATCHES and apply() take all, none, or "
            f"some of: {', '.join(ids)}"
        )
    left_out = {word[1:] for word in words if word.startswith("-")}
    if not left_out:
        return frozenset(words)
    if len(left_out) < len(set(words)):
        raise PatchError(f"{choice!r} mixes patches to take with patches to leave out (-id); write one kind only")
    return frozenset(ids) - left_out


def check_policy(on_drift: str) -> str:
    """Raises PatchError unless `on_drift` is one of `POLICIES`."""
    if on_drift not in POLICIES:
        words = ", ".join(POLICIES)
        raise PatchError(f"MEGATRON_MTP_PATCHES_ON_DRIFT, what a refused patch does, can be {words}, not {on_drift!r}")
    return on_drift
