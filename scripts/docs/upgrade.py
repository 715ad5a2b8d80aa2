"""The effects of an upgrade of Megatron, as Markdown: superfluous patches, and the needs of checkpoints."""

from __future__ import annotations

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatrons.states_by_release import KNOWN, state_in

from .addresses import address


def blocks() -> dict[str, str]:
    """The blocks `upgrade-steps` and `checkpoints`."""
    return {"upgrade-steps": "\n".join(filter(None, map(changes, KNOWN[:-1], KNOWN[1:]))), "checkpoints": checkpoints()}


def changes(before: str, after: str) -> str:
    """The patches whose state changes at the release `after`; '' if it changes for none."""
    changed = [patch for patch in CATALOG if state_in(patch, before) != state_in(patch, after)]
    native = [_link(patch) for patch in changed if state_in(patch, after) is State.NATIVE]
    repaired = [_link(patch) for patch in changed if state_in(patch, after) is not State.NATIVE]
    parts = [f"drop {', '.join(native)}"] * bool(native) + [f"keep {', '.join(repaired)}"] * bool(repaired)
    return f"* {after}: {'; '.join(parts)}." if parts else ""


def _link(patch: Patch) -> str:
    return f"[`{patch.id}`]({address(patch.id)})"


def checkpoints() -> str:
    """The patches that say something of checkpoints."""
    notes = {_link(patch): None for patch in CATALOG for note in patch.notes if note.startswith("Checkpoint")}
    return f"{', '.join(notes)}."
