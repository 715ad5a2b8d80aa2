"""A source file of Megatron's changes under a process that runs, and the module is loaded anew."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import megatron_mtp_patches
from inspect_patches import count
from megatron_mtp_patches.catalog import CATALOG

MODULE = "megatron.core.optimizer.optimizer"
TARGET = f"{MODULE}:ChainedOptimizer.step"
LINE = "    def step(self"


def look() -> dict:
    module = sys.modules[MODULE]
    file = Path(module.__file__)
    source = file.read_text(encoding="utf-8")
    head, _, tail = source.partition("class ChainedOptimizer(")
    changed = head + "class ChainedOptimizer(" + tail.replace(LINE, "    @(lambda function: function)\n" + LINE, 1)

    file.write_text(changed, encoding="utf-8")
    on_disk = attempt(lambda: megatron_mtp_patches.apply("skip-update-on-large-grad-norm", "raise"))
    file.write_text("# a line more\n" + source, encoding="utf-8")
    behind = attempt(lambda: megatron_mtp_patches.apply("skip-update-on-large-grad-norm", "raise"))

    file.write_text(source, encoding="utf-8")
    megatron_mtp_patches.apply()
    file.write_text(changed, encoding="utf-8")
    reloaded = attempt(lambda: importlib.reload(module))
    refused = tell()

    file.write_text(source, encoding="utf-8")
    megatron_mtp_patches.apply("none")
    importlib.reload(module)
    megatron_mtp_patches.apply()
    return {"on disk": on_disk, "behind": behind, "reloaded": reloaded, "refused": refused, "mended": tell()}


def attempt(action) -> str:
    try:
        action()
    except megatron_mtp_patches.PatchError as error:
        return str(error)
    return ""


def tell() -> dict:
    """Of each patch: its state, whether it needs the target, and how often its Replaces of the module are there."""
    states = {report.id: report.state for report in megatron_mtp_patches.status()}
    return {
        patch.id: [
            states[patch.id],
            any(edit.target == TARGET for edit in patch.edits),
            sorted({count(edit) for edit in patch.edits if type(edit).__name__ == "Replace"} - {None}),
        ]
        for patch in CATALOG
    }
