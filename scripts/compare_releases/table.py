"""The rows of the table: each case on each number of ranks against its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_mtp_patches.megatrons.known import REFERENCE

from scripts.common.markdown import Table

from .differences import Difference, compare

Records = dict[tuple[str, int, bool], Any]  # by release, number of ranks, and whether it was patched


class Row(NamedTuple):
    """A case on one number of ranks or, merged, on several. The reference itself has no cell."""

    case: str
    ranks: list[int]
    reference: str
    cells: dict[str, Difference]

    @property
    def is_wrong(self) -> bool:
        return any(cell.is_wrong for cell in self.cells.values())

    def texts(self, releases: list[str], causes: list[str]) -> list[str]:
        """The cells of the table; a number in one refers to `causes`."""
        texts = [self.case, ", ".join(map(str, self.ranks)), self.reference]
        for release in releases:
            cell = self.cells.get(release)
            note = f" ({causes.index(cell.cause) + 1})" if cell and cell.largest and cell.cause else ""
            texts.append(f"{cell or 'reference'}{note}")
        return texts


def compare_all(records: Records, releases: list[str], ranks: int) -> list[Row]:
    """A row for each case on this number of ranks: against native 0.19.2 if that has the case, else against patched."""
    native, patched = records[REFERENCE, ranks, False], records[REFERENCE, ranks, True]
    ours = {name: case for name, case in patched["cases"].items() if name not in native["cases"]}
    rows = []
    for word, reference, others in (
        ("native", native, releases),
        ("patched", {**patched, "cases": ours}, [release for release in releases if release != REFERENCE]),
    ):
        differences = {release: compare(reference, records[release, ranks, True]) for release in others}
        for name in reference["cases"]:
            rows.append(Row(name, [ranks], word, {release: cases[name] for release, cases in differences.items()}))
    return sorted(rows, key=lambda row: list(patched["cases"]).index(row.case))


def make_table(rows: list[Row], releases: list[str], device: str) -> Table:
    """The rows of all numbers of ranks."""
    merged = merge(rows)
    cells = [cell for row in rows for cell in row.cells.values()]
    causes = list(dict.fromkeys(cell.cause for cell in cells if cell.largest and cell.cause))
    return Table(
        f"The same seeded work on every release, on the {device.upper()}",
        ["case", "ranks", "reference", *releases],
        [row.texts(releases, causes) for row in merged],
        bad=[number for number, row in enumerate(merged) if row.is_wrong],
        note="\n".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1)),
    )


def describe(torch: dict[str, str]) -> str:
    """What the numbers of the table are; `torch` has the version of each release."""
    versions = ", ".join(f"torch {version} with {release}" for release, version in torch.items())
    if len(set(torch.values())) == 1:
        versions = f"torch {next(iter(torch.values()))}"
    return (
        f"Largest absolute differences from {REFERENCE}, without the patches (native) or with them (patched), of each "
        f'release with them; "bitwise": none. What a case does: scripts/compare_releases/*_cases.py. {versions}.'
    )


def merge(rows: list[Row]) -> list[Row]:
    """One row for those numbers of ranks on which a case came out the same, in the order of the cases."""
    merged: dict[tuple, Row] = {}
    for row in rows:
        outcome = tuple((release, str(cell)) for release, cell in row.cells.items())
        merged.setdefault((row.case, outcome), row._replace(ranks=[])).ranks.extend(row.ranks)
    order = list(dict.fromkeys(row.case for row in rows))
    return sorted(merged.values(), key=lambda row: (order.index(row.case), row.ranks))
