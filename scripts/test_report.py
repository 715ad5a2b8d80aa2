"""Print a table of pytest's JUnit reports, suite x environment.

python -m scripts.test_report FOLDER
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

try:
    import tomllib
except ImportError:
    import tomli as tomllib
from rich.console import Console
from rich.table import Table

MATRIX = Path(__file__).resolve().parents[1] / "ci" / "matrix.toml"


def main(folder: Path) -> None:
    matrix = tomllib.loads(MATRIX.read_text(encoding="utf-8"))
    suites = [*matrix["suite"], {"name": "compatibility", "tests": ["tests/compatibility", "tests/frameworks"]}]
    names = {path.removesuffix(".py").replace("/", "."): suite["name"] for suite in suites for path in suite["tests"]}
    found: dict[tuple[str, str], Counter[str]] = {}
    for report in sorted(folder.glob("*.xml")):
        environment = report.stem.partition(" with ")[0]  # "0.18.2 with modelopt" runs other suites of 0.18.2
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname") or case.get("name", "")  # a module that could not be collected
            suite = next((name for start, name in names.items() if f"{module}.".startswith(f"{start}.")), "other")
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            for row in (suite, "all"):
                counts = found.setdefault((row, environment), Counter())
                counts.update({outcome: 1, "seconds": float(case.get("time", 0))})  # type: ignore[dict-item]
    environments = list(dict.fromkeys(environment for _, environment in found))
    table = Table("suite", *environments, title="passed / failed / skipped, and the seconds that the tests took")
    for row in dict.fromkeys([*names.values(), "other", "all"]):
        if any((row, environment) in found for environment in environments):
            table.add_row(row, *(cell(found.get((row, environment))) for environment in environments))
    Console(width=160).print(table)


def cell(counts: Counter[str] | None) -> str:
    if counts is None:
        return "-"
    color = "red" if counts["failed"] else "green"
    numbers = " / ".join(str(counts[outcome]) for outcome in ("passed", "failed", "skipped"))
    return f"[{color}]{numbers}[/] {counts['seconds']:5.0f} s"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
