"""Runs `parity` on rows: python -m scripts.parity_scores.run_rows SCORES ROWS TREE RELEASE PATCHES [MUTATED FILE].

ROWS is a file of JSON; SCORES gets a line of JSON for each row, as soon as it is scored. The Megatron of TREE is
imported; a mutated file in it has to be what is imported as its module.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_mtp_patches.parity.cuts import list_cuts
from megatron_mtp_patches.parity.processes import Failed, prepare
from megatron_mtp_patches.parity.study import Result, Study
from megatron_mtp_patches.parity.trainings import judge_cut

from scripts.common.small_runs import make_small_run

from .mutant import check_import
from .outcomes import describe, is_decided
from .table import Score

RANKS = 4  # the most of a cut, as of the command if nothing else is said


def main() -> None:
    scores_file, rows_file, tree, release, patches, *mutated = sys.argv[1:]
    script = str(Path(tree, "pretrain_gpt.py"))
    prepare(script)
    for file in mutated:
        check_import(Path(file), Path(tree))
    rows = json.loads(Path(rows_file).read_text(encoding="utf-8"))
    with Path(scores_file).open("w", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(score(script, row, release, patches, bool(mutated))._asdict()), file=file, flush=True)


def score(script: str, row: dict[str, Any], release: str, patches: str, is_mutant: bool) -> Score:
    start = time.monotonic()
    results: list[Result] = []
    error = ""
    try:
        study = Study(script, *make_small_run(row["flags"]))
        for result in judge_cuts(study) if is_mutant else study.results(list_cuts(study.small, RANKS)):
            results.append(result)
            if is_decided(row, patches, is_mutant, results):
                break
    except Exception as raised:  # a run that ends in an error is scored as that
        error = f"{type(raised).__name__}: {raised}"
    return describe(row, release, patches, is_mutant, results, error, time.monotonic() - start)


def judge_cuts(study: Study) -> Iterator[Result]:
    """Yield the results of all cuts, without explanations: no known defect explains what a mutant does."""
    for cut in list_cuts(study.small, RANKS):
        records = study.trainings.train(cut.flags, cut.ranks)
        if isinstance(records, Failed):
            yield Result(cut, 0.0, refusal=records.error)
        else:
            yield Result(cut, 0.0, verdict=judge_cut(study.reference, records))


if __name__ == "__main__":
    main()
