"""Train what ci/watch lists with `--watch-invariants 1`, and say what the watch reported.

    python -m scripts.watch_scores clean   --python RELEASE=PYTHON --checkout RELEASE=FOLDER ... [--only NAME ...]
    python -m scripts.watch_scores defects --python RELEASE=PYTHON --checkout RELEASE=FOLDER ... [--only NAME ...]
    python -m scripts.watch_scores faults  --python RELEASE=PYTHON --checkout RELEASE=FOLDER ... [--only NAME ...]

A known defect and a planted fault are run with no patch but the watch. "clean" are the layouts of the faults, and the
runs of ci/parity/known.toml, with all patches and no fault. Each Python needs TransformerEngine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.common.arguments import add_checkouts, add_pythons, make_parser
from scripts.common.checkout_rows import run_in_checkout

from .listed import LISTS, read_rows
from .table import SCORES, Score, make_table, read_scores, write_scores


def main() -> int:
    parser = make_parser("scripts.watch_scores", __doc__)
    parser.add_argument("list", choices=LISTS)
    add_pythons(parser)
    add_checkouts(parser)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of a defect, of a fault, or of a layout")
    parser.add_argument("--out", type=Path, default=SCORES, metavar="FILE", help="default: ci/watch/scores.json")
    options = parser.parse_args()
    for release, python in options.python.items():
        rows = read_rows(options.list, release, options.only)
        patches = "all" if options.list == "clean" else "watch-invariants"
        lines = run_in_checkout(
            "scripts.watch_scores.run_rows", python, options.checkout[release], rows, patches, release, options.list
        )
        scores = [Score(**one) for one in lines]
        write_scores([*read_scores(options.out), *scores], options.out)
        print("\n".join(make_table(scores)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
