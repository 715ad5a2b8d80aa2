"""Print what pytest's reports in a folder say: suite x environment, seconds, and the slowest tests.

Ends with 1 if a test failed, a report is damaged, or there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

try:
    import tomllib
except ImportError:
    import tomli as tomllib
from rich.console import Console
from rich.table import Table

MATRIX = Path(__file__).with_name("matrix.toml")
SLOWEST = 10


class Case(NamedTuple):
    """One test on one environment."""

    name: str
    suite: str
    outcome: str
    seconds: float


class Totals:
    """What became of the tests of a suite."""

    def __init__(self, cases: list[Case]) -> None:
        self.passed, self.failed, self.skipped = (
            sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")
        )
        self.seconds = sum(case.seconds for case in cases)

    def __str__(self) -> str:
        style = "red" if self.failed or not self.passed else "green"
        return f"[{style}]{self.passed} / {self.failed} / {self.skipped}[/] {self.seconds:5.0f} s"


def read(report: Path, suites: dict[str, str]) -> list[Case]:
    """The tests of a JUnit report; `suites` has the suite of each folder, and of each file without its ending."""
    cases = []
    for element in ElementTree.parse(report).iter("testcase"):
        file, test = element.get("classname", ""), element.get("name", "")
        name = "::".join(filter(None, [file.replace(".", "/"), test if file else test.replace(".", "/")]))
        suite = next((suites[path] for path in suites if name.startswith((f"{path}/", f"{path}::"))), "other")
        kinds = {child.tag for child in element}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        cases.append(Case(name, suite, outcome, float(element.get("time", 0))))
    return cases


def main(folder: Path) -> int:
    matrix = tomllib.loads(MATRIX.read_text(encoding="utf-8"))
    suites = {path.removesuffix(".py"): suite["name"] for suite in matrix["suite"] for path in suite["tests"]}
    found: dict[str, list[Case]] = {}
    for report in sorted(folder.glob("*.xml")):
        # "0.18.2 with modelopt" is 0.18.2 in another environment, where other suites run.
        found.setdefault(report.stem.partition(" with ")[0], []).extend(read(report, suites))
    console = Console(width=160)
    console.print(make_table(found, [*suites.values(), "other"]))
    slowest = sorted(
        ((case, name) for name, cases in found.items() for case in cases), key=lambda pair: -pair[0].seconds
    )
    console.print(f"the {SLOWEST} slowest tests:")
    for case, name in slowest[:SLOWEST]:
        console.print(f"  {case.seconds:6.1f} s  {name}: {case.name}", markup=False, highlight=False, soft_wrap=True)
    total = Totals([case for cases in found.values() for case in cases])
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return int(total.failed > 0 or not total.passed)


def make_table(found: dict[str, list[Case]], suites: list[str]) -> Table:
    """A row for each suite, a column for each environment that pytest ran in."""
    table = Table("suite", *found, title="passed / failed / skipped, and the seconds that the tests took")
    for suite in dict.fromkeys(suites):
        parts = [[case for case in cases if case.suite == suite] for cases in found.values()]
        if any(parts):
            table.add_row(suite, *(str(Totals(part)) if part else "-" for part in parts))
    table.add_section()
    table.add_row("all", *(str(Totals(cases)) for cases in found.values()))
    return table


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
