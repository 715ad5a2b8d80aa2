"""Runs a module on rows, in a process that imports the Megatron of a checkout."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .process import ROOT, environment, run_or_exit


def run_in_checkout(
    module: str, python: str, tree: Path, rows: list[dict[str, Any]], patches: str, *words: str
) -> list[dict[str, Any]]:
    """What `python -m MODULE OUT ROWS TREE WORDS` has written to OUT, a line of JSON for each row of the file ROWS."""
    with tempfile.TemporaryDirectory() as folder:
        rows_file, out = Path(folder, "rows.json"), Path(folder, "out.json")
        rows_file.write_text(json.dumps(rows), encoding="utf-8")
        paths = os.pathsep.join(map(str, (tree, ROOT / "patches", ROOT)))
        variables = environment(patches, PYTHONPATH=paths, MEGATRON_MTP_PATCHES_DEFECTS="off")
        run_or_exit([python, "-W", "ignore", "-m", module, str(out), str(rows_file), str(tree), *words], variables)
        return [*map(json.loads, out.read_text(encoding="utf-8").splitlines())]
