"""Trains rows with the watch on: python -m scripts.watch_scores.run_rows SCORES ROWS TREE RELEASE LIST.

ROWS is a file of JSON; SCORES gets a line of JSON for each row, as soon as it is scored.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from megatron_mtp_patches.parity.processes import prepare

from .outcomes import describe
from .table import Score
from .training import run_row


def main() -> None:
    scores_file, rows_file, tree, release, name = sys.argv[1:]
    script = str(Path(tree, "pretrain_gpt.py"))
    prepare(script)
    rows = json.loads(Path(rows_file).read_text(encoding="utf-8"))
    with Path(scores_file).open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(score(script, row, release, name)._asdict()), file=file, flush=True)


def score(script: str, row: dict[str, Any], release: str, name: str) -> Score:
    start = time.monotonic()
    if name == "clean":
        listed = "not clean" if row.get("is_unrepaired") else "clean"
    else:
        listed = "silent" if "not_seen" in row else "caught"
    try:
        (found, said, has_same_bits), error = run_row(script, row), ""
    except Exception as raised:  # a run that ends in an error is scored as that
        found, said, has_same_bits, error = [], [], True, f"{type(raised).__name__}: {raised}"
    outcome = "not trained" if error else describe(row, found) if has_same_bits else "other bits"
    seconds = round(time.monotonic() - start)
    return Score(name, release, row["name"], outcome, listed, [*map(str, found)], said, error, seconds)


if __name__ == "__main__":
    main()
