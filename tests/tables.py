"""--write-tables: the rows that tests record become the tables of ci/.

A test calls `record_property(TABLE, [ROW, CELLS])`, where TABLE is one of scripts/evidence.py. The run must pass.
"""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import pytest

from scripts import study
from scripts.evidence import TABLES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", action="store_true", help="write this Megatron's part of the tables")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_tables:
        config.pluginmanager.register(Writer(config), "tables")


class Writer:
    """Collects the rows, and writes them when the run has passed."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder = config.rootpath / "ci"
        self.tables: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name in TABLES:
                    row, cells = value
                    self.tables.setdefault(name, {})[row] = cells

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            for name, rows in self.tables.items():
                file = self.folder / name / "cpu.json"
                columns = merge(json.loads(file.read_text(encoding="utf-8")), installed(TABLES[name].packages), rows)
                table = TABLES[name].make(columns)
                study.write(file.with_suffix(""), columns, table.title, [table])


def merge(columns: list[dict[str, Any]], versions: dict[str, str], rows: dict[str, Any]) -> list[dict[str, Any]]:
    """`columns` with these rows of this Megatron; Megatrons that have the same rows share a column."""
    for column in columns:
        column["megatrons"] = [other for other in column["megatrons"] if not is_same(other, versions)]
    same = next((column for column in columns if column["rows"] == rows), None)
    if same is None:
        same = {"megatrons": [], "rows": rows}
        columns = [*columns, same]
    same["megatrons"] = sorted([*same["megatrons"], versions], key=lambda one: list(one.values()))
    return sorted((one for one in columns if one["megatrons"]), key=lambda one: list(one["megatrons"][0].values()))


def is_same(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two have the same versions of all packages but torch."""
    return {**one, "torch": ""} == {**other, "torch": ""}


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of Megatron, "main" if it is no release, and of these packages."""
    from megatron_mtp_patches.engine.source import find_file

    version = runpy.run_path(str(find_file("megatron.core.package_info")))["__version__"].partition("+")[0]
    megatron = version if re.fullmatch(r"[\d.]+", version) else "main"
    return {"megatron-core": megatron, **study.versions(*packages)}
