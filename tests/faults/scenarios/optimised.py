"""python -OO: no assertions, no docstrings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import sys

import megatron_mtp_patches
from inspect_patches import describe
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli import main, make_parser
from megatron_mtp_patches.cli.megatron import import_targets


def hide_emerging_optimizers() -> None:
    """It edits a docstring of its own, so it cannot be imported; Megatron does without it."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        if name == "emerging-optimizers":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    importlib.metadata.version = version
    sys.modules["emerging_optimizers"] = None


def look() -> dict:
    hide_emerging_optimizers()
    failures = import_targets()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["explain", CATALOG[0].id])
    return {
        "failures": failures,
        "docstrings": CATALOG[0].doc,
        "found": describe(),
        "summaries": {report.id: report.summary for report in megatron_mtp_patches.status()},
        "explained": [code, output.getvalue()],
        "help": make_parser().format_help(),
    }


if __name__ == "__main__":
    print(json.dumps({"optimised": look()}))
