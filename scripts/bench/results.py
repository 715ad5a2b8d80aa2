"""The results of step, import and acceptance: DEVICE.json, and DEVICE.md with the tables of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.arguments import add_pythons

from .tables import Row, tables

PLACE = ("case", "ranks", "release", "device", "tokens", "vocabulary", "hidden")  # what a row is measured of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pythons(parser)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="cpu: a rehearsal (default)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DEVICE.json and .md; other rows there stay")


def report(kind: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Print the tables of `rows`, and write them with --out."""
    show(kind, rows)
    write(kind, rows, options)


def show(kind: str, rows: list[Row]) -> None:
    for table in tables({kind: rows}):
        table.show()


def write(kind: str, rows: list[Row], options: argparse.Namespace, versions: dict[str, Any] | None = None) -> None:
    """With --out, write these rows beside the others, and their tables."""
    if options.out:
        about = {"device": _device_name(options.device), **({"versions": versions} if versions else {})}
        results = update(options.out / f"{options.device}.json", {"about": about, kind: rows})
        title = f"What the patches cost on {results['about']['device']}"
        study.write(options.out / options.device, results, title, tables(results))


def update(file: Path, results: dict[str, Any]) -> dict[str, Any]:
    """`results`, and the rows of `file` that were not measured now; a new row takes the place of an old one."""
    if not file.is_file():
        return results
    before = json.loads(file.read_text(encoding="utf-8"))
    versions = {**before["about"].get("versions", {}), **results["about"].get("versions", {})}
    about = {**before["about"], **results["about"], **({"versions": versions} if versions else {})}
    rows = {
        kind: list(_by_place(before.get(kind, []), measured)) for kind, measured in results.items() if kind != "about"
    }
    return {**before, **rows, "about": about}


def _by_place(*lists: list[Row]) -> Iterable[Row]:
    """The rows of all lists in their order; of those that measure the same, the last one in the place of the first."""
    return {tuple(row.get(name) for name in PLACE): row for rows in lists for row in rows}.values()


def _device_name(device: str) -> str:
    if device == "cpu":
        return "the CPU (rehearsal)"
    import torch

    return torch.cuda.get_device_name()
