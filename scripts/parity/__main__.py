"""Do the same seeded work on every release of Megatron and compare every number. Needs a Python for each release.

    python -m scripts.parity --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [--ranks 1,2,4] [CASE ...]

Records each release with the patches, and 0.19.2, which must be among them, without the patches too. Prints the table
of the largest differences and writes it to --out. Ends with 1 if anything differs that is not meant to. CASE is a
pattern, as 'model/*'; scripts/parity/*_cases.py say what each does. layer_wise needs emerging-optimizers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from scripts.common.arguments import REFERENCE, add_pythons, make_parser, numbers
from scripts.common.process import ROOT, environment, run_or_exit

from .record import RECORDED
from .table import Records, Row, compare_all, make_table


def main() -> int:
    parser = make_parser("scripts.parity", __doc__)
    add_pythons(parser)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="numbers of ranks (default: 1,2,4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="cpu: a rehearsal (default)")
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "parity", help="folder of the table")
    parser.add_argument("--records", type=Path, help="keep the records in this folder")
    parser.add_argument("cases", nargs="*", default=["*"], metavar="CASE")
    options = parser.parse_args()
    if REFERENCE not in options.python:
        parser.error(f"--python {REFERENCE}=PYTHON is missing: everything is compared with that release")
    with tempfile.TemporaryDirectory() if options.records is None else nullcontext(options.records) as folder:
        records = record_all(options.python, options.ranks, options.device, options.cases, Path(folder))
    releases = list(options.python)
    rows = [row for ranks in options.ranks for row in compare_all(records, releases, ranks)]
    report(rows, {release: records[release, options.ranks[0], True]["torch"] for release in releases}, options)
    return int(any(row.is_wrong for row in rows))


def record_all(pythons: dict[str, str], ranks: list[int], device: str, patterns: list[str], folder: Path) -> Records:
    todo = [(release, number, patched) for number in ranks for release in pythons for patched in (True, False)]
    todo = [(release, number, patched) for release, number, patched in todo if patched or release == REFERENCE]
    folder.mkdir(parents=True, exist_ok=True)
    records: Records = {}
    with Progress() as progress:
        bar = progress.add_task("", total=len(todo))
        for release, number, patched in todo:
            name = release if patched else f"{release} without patches"

            def tell(case: str, where: str = f"{name}, {number} rank{'s' * (number > 1)}") -> None:
                progress.update(bar, description=f"{where}: {case}")

            tell("starting")
            file = folder / f"{name.replace(' ', '_')}-{number}.json"
            found = record(pythons[release], number, device, patched, patterns, file, tell)
            if release[0].isdigit() and found["megatron-core"] != release:
                sys.exit(f"{pythons[release]} has megatron-core {found['megatron-core']}, not {release}")
            records[release, number, patched] = found
            progress.advance(bar)
    return records


def record(
    python: str, ranks: int, device: str, patched: bool, patterns: list[str], file: Path, tell: Callable[[str], None]
) -> Any:
    """What record.py writes to `file`; `tell` hears of each case that is done."""
    launcher = [python]
    if ranks > 1 or device == "gpu":  # a rehearsal is its own launcher
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "scripts.parity.record", str(file.resolve()), device, *patterns]

    def on_line(line: str) -> None:
        if line.startswith(RECORDED):
            tell(line.removeprefix(RECORDED))

    run_or_exit(command, environment("all" if patched else "none"), on_line=on_line)
    return json.loads(file.read_text(encoding="utf-8"))


def report(rows: list[Row], torch_versions: dict[str, str], options: Any) -> None:
    """Print the table, below it where anything differs first, and write DEVICE.md and .json."""
    device, releases = options.device, list(options.python)
    title = f"The same seeded work on every release, on the {device.upper()}"
    table = make_table(rows, releases, title)
    table.show()
    for row in rows:
        for release, cell in row.cells.items():
            if cell.is_wrong:
                Console().print(f"{row.case}, {release}: {cell.first}", style="red", markup=False, soft_wrap=True)
    versions = ", ".join(f"torch {version} with {release}" for release, version in torch_versions.items())
    if len(set(torch_versions.values())) == 1:
        versions = f"torch {torch_versions[releases[0]]}"
    what = (
        f"Largest absolute differences from {REFERENCE}, without the patches (native) or with them (patched), of each "
        f'release with them; "bitwise": none. What a case does: scripts/parity/*_cases.py. {versions}.'
    )
    cells = [
        {
            "case": row.case,
            "ranks": row.ranks[0],
            "reference": row.reference,
            "largest differences": {release: cell.largest for release, cell in row.cells.items()},
        }
        for row in rows
    ]
    record = {"what": what, "device": device, "torch": torch_versions, "rows": cells}
    lines = [f"# {title}", "", what, "", *table.lines(), *(["", table.note] if table.note else [])]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{device}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (options.out / f"{device}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
