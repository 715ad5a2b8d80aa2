"""Which code changes which function of Megatron's, as Markdown."""

from __future__ import annotations

from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag

from scripts.common.markdown import table


def blocks() -> dict[str, str]:
    """Return the table of docs/changed-functions.md."""
    patches: dict[tuple[str, str], list[str]] = {}
    for patch in (*BASE, *CATALOG):
        for edit in patch.edits:
            code = edit.implementation or ""
            if isinstance(edit, AddField):
                code = f"the field {edit.field}"
            elif isinstance(edit, AddFlag):
                code = f"the flag {edit.flag}"
            patches.setdefault((edit.target, code), []).append(patch.id)
    rows = [[f"`{target}`", f"`{code}`", ", ".join(ids)] for (target, code), ids in sorted(patches.items())]
    return {"changed-functions": "\n".join(table(["changed", "by", "patches"], rows))}
