"""What an upgrade of Megatron changes, as Markdown: which patches it makes unnecessary, and what checkpoints need."""

from __future__ import annotations

from itertools import pairwise

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.description import settings
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.state import State

from scripts.common.markdown import table

from .declared import COLUMNS, state


def blocks() -> dict[str, str]:
    """The blocks `upgrade-steps` and `checkpoints`."""
    steps = [row for before, after in pairwise(COLUMNS) for row in changes(before, after)]
    header = ["from", "patch", "state", "what to do"]
    return {"upgrade-steps": "\n".join(table(header, steps)), "checkpoints": checkpoints()}


def changes(before: str, after: str) -> list[list[str]]:
    """A row for each patch whose state changes at the release `after`, with what a user may do about it."""
    return [
        [after, f"[`{patch.id}`]({patch.id}.md)", state(patch, after), advice(patch, after)]
        for patch in CATALOG
        if state(patch, before) != state(patch, after)
    ]


def advice(patch: Patch, release: str) -> str:
    """What to do with a patch whose change `release` has."""
    theirs, ours = (
        ", ".join(f"`{one.name}`" for one in settings(patch) if one.is_upstream is whose) for whose in (True, False)
    )
    kept = "Drop it." if state(patch, release) is State.NATIVE else "Keep it for its repairs."
    return kept + f" Megatron has {theirs}." * bool(theirs) + f" Only the patch adds {ours}." * bool(ours)


def checkpoints() -> str:
    """What the declarations say of checkpoints."""
    return "\n".join(
        f"* [`{patch.id}`]({patch.id}.md): {note.removeprefix('Checkpoints:').strip()}"
        for patch in CATALOG
        for note in patch.notes
        if note.startswith("Checkpoint")
    )
