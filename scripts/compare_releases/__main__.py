"""Do the same seeded work on every release of Megatron and compare every number. Needs a Python for each release.

    python -m scripts.compare_releases --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--ranks 1,2,4] [CASE ...]

Records each release with the patches, and 0.19.2, which must be among them, without the patches too. Prints the table
of the largest differences and writes it to --out. Ends with 1 if anything differs that is not meant to. CASE is a
pattern, as 'model/*'; scripts/compare_releases/*_cases.py say what each does. layer_wise needs emerging-optimizers.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from megatron_mtp_patches.megatrons.known import REFERENCE
from rich.console import Console
from rich.progress import track

from scripts import study
from scripts.common.arguments import add_pythons, make_parser, numbers
from scripts.common.process import ROOT

from .table import Records, Row, compare_all, describe, make_table


def main() -> int:
    parser = make_parser("scripts.compare_releases", __doc__)
    add_pythons(parser)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="numbers of ranks (default: 1,2,4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="cpu: a rehearsal (default)")
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "compare_releases", help="folder of the table")
    parser.add_argument("cases", nargs="*", default=["*"], metavar="CASE")
    options = parser.parse_args()
    if REFERENCE not in options.python:
        parser.error(f"--python {REFERENCE}=PYTHON is missing: everything is compared with that release")
    records = record_all(options)
    rows = [row for ranks in options.ranks for row in compare_all(records, list(options.python), ranks)]
    torch = {release: records[release, options.ranks[0], True]["torch"] for release in options.python}
    report(rows, torch, options.device, options.out)
    return int(any(row.is_wrong for row in rows))


def record_all(options: Namespace) -> Records:
    todo = [(release, ranks, True) for ranks in options.ranks for release in options.python]
    todo += [(REFERENCE, ranks, False) for ranks in options.ranks]
    records: Records = {}
    for release, ranks, patched in track(todo, "recording"):
        patches = "all" if patched else "none"
        words = ["scripts.compare_releases.run_cases", options.device, *options.cases]
        record = study.measure(options.python[release], *words, ranks=ranks, patches=patches)
        study.check_release(release, record["megatron-core"])
        records[release, ranks, patched] = record
    return records


def report(rows: list[Row], torch: dict[str, str], device: str, folder: Path) -> None:
    """Print the table, below it where anything differs first, and write DEVICE.md and .json."""
    table = make_table(rows, list(torch), device)
    table.show()
    for row in rows:
        for release, cell in row.cells.items():
            if cell.is_wrong:
                Console().print(f"{row.case}, {release}: {cell.first}", style="red", markup=False, soft_wrap=True)
    cells = []
    for row in rows:
        largest = {release: cell.largest for release, cell in row.cells.items()}
        place = {"case": row.case, "ranks": row.ranks[0], "reference": row.reference}
        cells.append({**place, "largest differences": largest})
    record = {"device": device, "torch": torch, "rows": cells}
    study.write(folder / device, record, table.title, [table], describe(torch))


if __name__ == "__main__":
    sys.exit(main())
