"""Score `parity` by the wrong numbers of ci/parity/known.toml, or by the mutants of ci/parity/mutants.toml.

    python -m scripts.parity_scores known   --python RELEASE=PYTHON --checkout RELEASE=FOLDER ... [--only NAME ...]
    python -m scripts.parity_scores mutants --python RELEASE=PYTHON --checkout RELEASE=FOLDER ... [--only NAME ...]

A known wrong number is run unpatched and with all patches, a mutant unpatched in a copy of the checkout. Writes what
came of each to ci/parity/scores.json, where the rows of others stay; `python -m scripts.docs` makes the table of
docs/parity.md of it. Each Python needs TransformerEngine. 30 mutants take ten minutes on two CPU cores, 31 known wrong
numbers eight.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.common.arguments import add_checkouts, add_pythons, make_parser
from scripts.common.checkout_rows import run_in_checkout
from scripts.read_sources import site_packages

from .listed import LISTS, read_rows
from .mutant import make_mutant
from .table import SCORES, Score, read_scores, write_scores


def main() -> int:
    parser = make_parser("scripts.parity_scores", __doc__)
    parser.add_argument("list", choices=LISTS)
    add_pythons(parser)
    add_checkouts(parser)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of a defect, or of a mutant, reserves included")
    parser.add_argument("--out", type=Path, default=SCORES, metavar="FILE", help="default: ci/parity/scores.json")
    options = parser.parse_args()
    if lacking := sorted(options.python.keys() - options.checkout.keys()):
        parser.error(f"--checkout is missing for {', '.join(lacking)}")
    for release, python in options.python.items():
        checkout, rows = options.checkout[release], read_rows(options.list, release, options.only)
        if options.list == "known":
            for patches in ("none", "all"):
                _keep(_run(python, checkout, release, rows, patches), options.out)
        for row in rows if options.list == "mutants" else ():
            with tempfile.TemporaryDirectory() as folder:
                file = make_mutant(row, checkout, site_packages(python), Path(folder))
                _keep(_run(python, Path(folder), release, [row], "none", file), options.out)
    return 0


def _run(
    python: str, tree: Path, release: str, rows: list[dict[str, Any]], patches: str, mutated: Path | None = None
) -> list[Score]:
    """Run `parity` on the rows in one process that imports the Megatron of `tree`; `mutated` is a file of it."""
    words = [release, patches, *([str(mutated)] if mutated else [])]
    lines = run_in_checkout("scripts.parity_scores.run_rows", python, tree, rows, patches, *words)
    return [Score(**one) for one in lines]


def _keep(scores: list[Score], file: Path) -> None:
    """Print the scores, and write them among those of `file`."""
    for one in scores:
        place = f"{one.release}, {one.name}" + ", all patches" * (one.patches == "all")
        print(f"{place}: {one.outcome} {one.first or one.refused or ''}", flush=True)
    write_scores([*read_scores(file), *scores], file)


if __name__ == "__main__":
    sys.exit(main())
