"""What an upgrade of Megatron changes, as Markdown: which patches it makes unnecessary, and what checkpoints need."""

from __future__ import annotations

from itertools import pairwise

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.declarations.states_by_release import KNOWN, advice, state_in

from scripts.common.markdown import table

from .addresses import address


def blocks() -> dict[str, str]:
    """The blocks `upgrade-steps` and `checkpoints`."""
    steps = [row for before, after in pairwise(KNOWN) for row in changes(before, after)]
    header = ["from", "patch", "state", "what to do"]
    return {"upgrade-steps": "\n".join(table(header, steps)), "checkpoints": checkpoints()}


def changes(before: str, after: str) -> list[list[str]]:
    """A row for each patch whose state changes at the release `after`, with what a user may do about it."""
    return [
        [after, f"[`{patch.id}`]({address(patch.id)})", state_in(patch, after), advice(patch, after)]
        for patch in CATALOG
        if state_in(patch, before) != state_in(patch, after)
    ]


def checkpoints() -> str:
    """What the declarations say of checkpoints."""
    return "\n".join(
        f"* [`{patch.id}`]({address(patch.id)}): {note.removeprefix('Checkpoints:').strip()}"
        for patch in CATALOG
        for note in patch.notes
        if note.startswith("Checkpoint")
    )
