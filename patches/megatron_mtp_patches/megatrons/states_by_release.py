"""The state of a patch in each release, by what its declaration says of upstream. Nothing installed is read."""

from __future__ import annotations

from ..declarations.description import setting_texts
from ..engine import Patch
from ..engine.state import State
from .known import since


def state_in(patch: Patch, release: str) -> State:
    """Return applied, repaired or native, the state of `patch` in one of `VERSIONS`.

    What upstream listed first decides; later changes to it are defects until then.
    """
    first = patch.upstream[0] if patch.upstream else None
    if first is None or first.native_since is None or first.repository:
        return State.APPLIED
    if release not in (*since(first.native_since), *first.also_in):
        return State.APPLIED
    return State.REPAIRED if patch.repairs else State.NATIVE


def advice(patch: Patch, release: str) -> str:
    """Say what to do with a patch whose change `release` has."""
    theirs, ours = (
        ", ".join(f"`{one.name}`" for one in setting_texts(patch) if one.is_upstream is whose)
        for whose in (True, False)
    )
    kept = "Drop it." if state_in(patch, release) is State.NATIVE else "Keep it for its repairs."
    return kept + f" Megatron has {theirs}." * bool(theirs) + f" Only the patch adds {ours}." * bool(ours)
