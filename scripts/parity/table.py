"""How far records are from their reference, and the table of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import markdown_pages

BITWISE = "bitwise"


class Difference(NamedTuple):
    """Largest absolute differences by kind of number, and the first place; {} and "": equal to the bit.

    `cause`: why this release is meant to differ, if that is the cause of all that differs.
    """

    largest: dict[str, float]
    first: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{kind} {size:.1e}" for kind, size in self.largest.items()) or BITWISE

    @property
    def is_wrong(self) -> bool:
        return bool(self.largest) and not self.cause


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Difference]:
    """For each case of `reference` how far `other` is from it."""
    if reference["ranks"] != other["ranks"]:
        raise SystemExit(f"one record is of {reference['ranks']} ranks, another of {other['ranks']}")
    return {name: _compare_case(case, other["cases"].get(name)) for name, case in reference["cases"].items()}


def _compare_case(reference: dict[str, Any], other: dict[str, Any] | None) -> Difference:
    if other is None:
        return Difference({"not recorded": math.inf}, "there is no such case")
    numbers, expected = dict(_flatten(other["of ranks"])), dict(_flatten(reference["of ranks"]))
    largest: dict[str, float] = {}
    first, cause = "", other["cause"]
    for place in {**expected, **numbers}:
        number, wanted = numbers.get(place, "nothing"), expected.get(place, "nothing")
        if _exactly(number) != _exactly(wanted):
            kind = _kind(place)
            largest[kind] = max(largest.get(kind, 0.0), _size(number, wanted))
            text = f"{' '.join(map(str, place))}: {number} instead of {wanted}"
            if cause and not set(place) & set(other["cause of"]):
                first, cause = text, ""
            first = first or text
    return Difference(largest, first, cause)


def _flatten(value: Any, place: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Rank, "step", its number, kind, which ...: number."""
    if isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flatten(part, (*place, key) if place else ("rank", key))
    else:
        yield place, value


def _kind(place: tuple) -> str:
    return place[4] if place[2] == "steps" else place[2]


def _exactly(value: Any) -> str:
    """Tells -0.0 from 0.0, and NaN equals NaN; a count is 3 in one release and 3.0 in another."""
    return repr(float(value)) if isinstance(value, (int, float)) else str(value)


def _size(number: Any, wanted: Any) -> float:
    """Infinite where one alone is no number; a hash has no size."""
    if isinstance(number, str) and isinstance(wanted, str):
        return 0.0
    if not isinstance(number, (int, float)) or not isinstance(wanted, (int, float)):
        return math.inf
    size = abs(number - wanted)
    return math.inf if math.isnan(size) else float(size)


class Row(NamedTuple):
    """A case on one number of ranks or, merged, on several. The reference itself has no cell."""

    case: str
    ranks: list[int]
    reference: str
    cells: dict[str, Difference]

    def texts(self, releases: list[str], causes: list[str]) -> list[str]:
        """What stands in the table; a number refers to one of `causes`."""
        texts = [self.case, ", ".join(map(str, self.ranks)), self.reference]
        for release in releases:
            cell = self.cells.get(release)
            note = f" ({causes.index(cell.cause) + 1})" if cell and cell.largest and cell.cause else ""
            texts.append(f"{cell or 'reference'}{note}")
        return texts


def merge(rows: list[Row]) -> list[Row]:
    """One row for those numbers of ranks on which a case came out the same, in the order of the cases."""
    merged: dict[tuple, Row] = {}
    for row in rows:
        outcome = tuple((release, str(cell)) for release, cell in row.cells.items())
        merged.setdefault((row.case, outcome), row._replace(ranks=[])).ranks.extend(row.ranks)
    order = list(dict.fromkeys(row.case for row in rows))
    return sorted(merged.values(), key=lambda row: (order.index(row.case), row.ranks))


def _causes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(cell.cause for row in rows for cell in row.cells.values() if cell.largest and cell.cause))


def heading(releases: list[str]) -> list[str]:
    return ["case", "ranks", "reference", *releases]


def show(rows: list[Row], releases: list[str], title: str) -> None:
    """On the terminal, and below the table where anything differs first."""
    from rich.console import Console
    from rich.table import Column, Table

    causes = _causes(rows)
    table = Table(*(Column(text, overflow="fold") for text in heading(releases)), title=title)
    for row in merge(rows):
        style = "red" if any(cell.is_wrong for cell in row.cells.values()) else None
        table.add_row(*row.texts(releases, causes), style=style)
    console = Console()
    console.print(table)
    for number, cause in enumerate(causes, 1):
        console.print(f"({number}) {cause}", highlight=False)
    for row in rows:
        for release, cell in row.cells.items():
            if cell.is_wrong:
                console.print(f"{row.case}, {release}: {cell.first}", style="red", markup=False, soft_wrap=True)


def write(rows: list[Row], releases: list[str], about: dict[str, Any], title: str, folder: Path) -> None:
    """`folder`/DEVICE.md and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    causes = _causes(rows)
    lines = [f"# {title}", "", about["what"], ""]
    lines += markdown_pages.table(heading(releases), (row.texts(releases, causes) for row in merge(rows)))
    lines += ["", *(f"({number}) {cause}" for number, cause in enumerate(causes, 1))] if causes else []
    (folder / f"{about['device']}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    cells = [
        {
            "case": row.case,
            "ranks": row.ranks[0],
            "reference": row.reference,
            "largest differences": {release: cell.largest for release, cell in row.cells.items()},
        }
        for row in rows
    ]
    text = json.dumps({**about, "rows": cells}, indent=1)
    (folder / f"{about['device']}.json").write_text(text + "\n", encoding="utf-8")
