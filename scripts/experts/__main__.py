"""Compare the norms that Megatron reports for a mixture of experts with those of all its gradients, gathered by hand.

    python -m scripts.experts --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--out ci/experts]

Trains a small GPT with grouped experts of TransformerEngine and an MTP head for one step on four ranks of a rehearsal,
with and without the patches, under each condition of scripts/experts/conditions.py. Prints how much of each norm is
reported and writes it to --out. Ends with 1 if anything is missing with the patches.

Each Python needs torch, megatron-core and TransformerEngine (installed with --no-deps); emerging-optimizers for Muon.
The parameter norm is measured where Megatron's trainer can be imported: put a checkout of 0.16.1 on PYTHONPATH for that
release. One release may be given twice, as 0.16.1 and 0.16.1-newer, with another TransformerEngine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT
from scripts.common.recording import keep, record_on_ranks
from scripts.experts.conditions import RANKS
from scripts.experts.table import PATCH, TOLERANCE, largest_deviation, make_table


def main() -> int:
    parser = make_parser("scripts.experts", __doc__)
    add_pythons(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "experts", help="folder of the table")
    options = parser.parse_args()
    with Progress() as progress:
        bar = progress.add_task("", total=2 * len(options.python))
        found = {}
        for label, python in options.python.items():
            for patched in (False, True):
                progress.update(bar, description=f"{label}, {'patched' if patched else 'plain'}")
                patches = "all" if patched else f"-{PATCH}"
                found[label, patched] = record_on_ranks(python, "scripts.experts.record", RANKS, patches, progress)
                progress.advance(bar)
    kept = [{"label": label, "patched": patched, **result} for (label, patched), result in found.items()]
    keep(options.out, make_table(kept), kept)
    wrong = [
        f"{label}, {row['condition']}: {deviation:.1e} from the norms by hand"
        for (label, patched), result in found.items()
        for row in result["rows"]
        if patched and (deviation := largest_deviation(row)) > TOLERANCE
    ]
    wrong += [
        f"{label}, {optimizer}: copies of an expert are {difference:.1e} apart"
        for (label, patched), result in found.items()
        for optimizer, difference in result["replicas apart"].items()
        if patched and difference
    ]
    for line in wrong:
        Console().print(line, style="red", markup=False, soft_wrap=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
