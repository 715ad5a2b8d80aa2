#!/usr/bin/env python3
"""The same seeded work on every release of Megatron, number by number.

    scripts/parity.py run --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--ranks 1,2,4] [CASE...]
    python -m megatron_mtp_patches run --device cpu scripts/parity.py record OUT.json [CASE...]
    python scripts/parity.py compare EXPECTED.json OUT.json...

`run` records with every interpreter, each with that release and what this package needs, and once with 0.19.2 without
the patches. It prints the table of the largest differences and writes it to --out. `record` writes what each step of
each case gave, and the parameters in the end; with MEGATRON_MTP_PATCHES=none 0.19.2 gives upstream's own numbers. `run`
and `compare` end with 1 if anything differs that is not meant to. CASE is a pattern, as 'model/*';
scripts/parity/*_cases.py say what each does. layer_wise needs emerging-optimizers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pythons import numbers, release_and_python

sys.path.insert(0, str(Path(__file__).parent / "parity"))


def compare(expected: Path, others: list[Path]) -> bool:
    """Print how far `others` are from `expected`; whether all is as it should be."""
    import table

    reference = table.read(expected)
    found = {other.stem: table.compare(reference, table.read(other)) for other in others}
    rows = [
        table.Row(name, [reference["ranks"]], expected.stem, {stem: found[stem][name] for stem in found})
        for name in reference["cases"]
    ]
    table.show(rows, list(found), "largest absolute differences")
    return not any(cell.is_wrong for row in rows for cell in row.cells.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--python", type=release_and_python, action="append", required=True, metavar="RELEASE=PYTHON")
    running.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    running.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    running.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "ci/parity", help="folder of the table"
    )
    running.add_argument("--records", type=Path, help="keep the records in this folder")
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    for command in (running, recording):
        command.add_argument("cases", nargs="*", default=["*"], metavar="CASE")
    comparing = commands.add_parser("compare")
    comparing.add_argument("expected", type=Path)
    comparing.add_argument("others", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "record":
        from cases import record

        record(options.file, options.cases)
        return 0
    if options.command == "compare":
        return int(not compare(options.expected, options.others))
    from runs import run

    pythons = dict(options.python)
    return int(not run(pythons, options.ranks, options.device, options.cases, options.out, options.records))


if __name__ == "__main__":
    sys.exit(main())
