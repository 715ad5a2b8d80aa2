"""Compare the losses of MTP heads, and their gradients, with float64 autograd on full logits.

    python -m scripts.losses --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--out ci/losses]

Runs process_mtp_loss under each condition of scripts/losses/conditions.py on two ranks of a rehearsal. Prints how far
value and gradient are from the reference and writes it to --out. Ends with 1 if one in float32 is farther than it may
be. Each Python needs torch and megatron-core.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT
from scripts.common.recording import keep, record_on_ranks
from scripts.losses.conditions import RANKS
from scripts.losses.table import make_table, too_far


def main() -> int:
    parser = make_parser("scripts.losses", __doc__)
    add_pythons(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "losses", help="folder of the table")
    options = parser.parse_args()
    kept = []
    with Progress() as progress:
        bar = progress.add_task("", total=len(options.python))
        for label, python in options.python.items():
            progress.update(bar, description=label)
            found = record_on_ranks(python, "scripts.losses.record", RANKS, "all", progress)
            kept.append({"label": label, **found})
            progress.advance(bar)
    keep(options.out, make_table(kept), kept)
    wrong = [f"{one['label']}, {condition}" for one in kept for condition in too_far(one["found"])]
    for line in wrong:
        Console().print(f"{line}: too far from the reference", style="red", markup=False, soft_wrap=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
