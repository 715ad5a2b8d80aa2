"""Print what the test matrix found: release x suite, passed / failed / skipped. Ends with 1 if anything failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main(folder: Path) -> int:
    releases = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = {
        release: {path.stem: json.loads(path.read_text()) for path in (folder / release).glob("*.json")}
        for release in releases
    }
    suites = sorted({suite for results in found.values() for suite in results})
    table = Table("suite", *(f"megatron-core {release}" for release in releases), title="passed / failed / skipped")
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in suites:
        table.add_row(suite, *(_cell(found[release].get(suite), totals) for release in releases))
    seconds = {release: sum(result["seconds"] for result in found[release].values()) for release in releases}
    table.add_section()
    table.add_row("minutes", *(f"{seconds[release] / 60:.1f}" for release in releases))
    Console(width=max(100, 30 + 24 * len(releases))).print(table)
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return int(totals["failed"] > 0 or not releases)


def _cell(result: dict | None, totals: dict[str, int]) -> str:
    if result is None:
        return "[red]not run[/]"
    for key in totals:
        totals[key] += result[key]
    style = "red" if result["failed"] or not result["passed"] else "green"
    return f"[{style}]{result['passed']} / {result['failed']} / {result['skipped']}[/]"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
