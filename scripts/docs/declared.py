"""What the declarations say, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_mtp_patches
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch, PullRequest
from megatron_mtp_patches.engine.state import State
from packaging.version import Version

from scripts.common.markdown import table

FINGERPRINTS = Path(megatron_mtp_patches.__file__).with_name("fingerprints.json")


def blocks() -> dict[str, str]:
    return {"releases": releases_table()}


def releases_table() -> str:
    """Patch x release: its state there."""
    releases = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))["releases"]
    rows = (
        [
            f"[`{patch.id}`](docs/{patch.id}.md)",
            ", ".join(map(_link, patch.upstream)) or "none",
            *(state(patch, release) for release in releases),
        ]
        for patch in CATALOG
    )
    return "\n".join(table(["patch", "upstream", *releases], rows))


def state(patch: Patch, release: str) -> State:
    """Applied, repaired or native. What upstream listed first decides; later changes to it are defects until then."""
    first = patch.upstream[0] if patch.upstream else None
    ours = first is None or first.native_since is None or _elsewhere(first)
    if ours or (release != "main" and Version(release) < Version(first.native_since)):
        return State.APPLIED
    return State.REPAIRED if patch.repairs else State.NATIVE


def _link(change: PullRequest) -> str:
    link = f"[{change}]({change.url})"
    if _elsewhere(change):
        return f"{link} (its {change.native_since})"
    return link if change.native_since else f"{link} ({change.fate})"


def _elsewhere(change: PullRequest) -> bool:
    return change.repository != PullRequest(0).repository
