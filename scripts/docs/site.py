"""The pages of the site alone: long lists, and all that a patch declares.

A list takes the place of the sentence between `<!-- made by nox -s docs: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

from megatron_mtp_patches.catalog import BASE, CATALOG

from scripts.common.markdown import table

from . import kept
from .declared import table_of_patches, whole_head, worker
from .defects import minor_defects


def lists() -> dict[str, str]:
    """What takes the place of a sentence that says which command prints it."""
    return {
        "changed-functions": changed_functions(),
        "minor-defects": minor_defects(),
        "pins-by-patch": kept.pins_by_patch(),
    }


def blocks() -> dict[str, str]:
    """These lists, the table of all patches, and the first part of the section of each."""
    return {**lists(), "patches": table_of_patches(), **{patch.id: whole_head(patch) for patch in CATALOG}}


def changed_functions() -> str:
    """The changed functions of Megatron, and the code that changes each."""
    patches: dict[tuple[str, str], list[str]] = {}
    for patch in (*BASE, *CATALOG):
        for edit in patch.edits:
            patches.setdefault((edit.target, worker(edit)), []).append(patch.id)
    rows = [
        [f"`{target}`", f"`{code}`", ", ".join(dict.fromkeys(ids))] for (target, code), ids in sorted(patches.items())
    ]
    return "\n".join(table(["changed", "by", "patches"], rows))
