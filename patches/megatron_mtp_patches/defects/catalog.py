"""All known defects, and the releases that have each of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..engine import Patch
from .declare import Defect
from .probe import has_defect

PACKAGE = Path(__file__).parents[1]
RELEASES = PACKAGE / "defects.json"


def defect_modules() -> list[ModuleType]:
    """TOPIC/*defects.py, each with its `DEFECTS`."""
    package, files = __package__.rpartition(".")[0], sorted(PACKAGE.glob("*/*defects.py"))
    return [import_module(f"{package}.{file.parent.name}.{file.stem}") for file in files]


@functools.cache
def known_defects() -> tuple[Defect, ...]:
    """The defects of all topics, the most severe first."""
    defects = (defect for module in defect_modules() for defect in module.DEFECTS)
    return tuple(sorted(defects, key=lambda defect: -defect.severity))


def remover_of(defect: Defect, patches: Iterable[Patch]) -> Patch | None:
    """The one of these patches that removes a defect; None if none does. Nothing else joins the two."""
    return next((patch for patch in patches if patch.id == defect.patch), None)


def removed_by(patch: Patch) -> list[Defect]:
    """The known defects that a patch removes."""
    return [defect for defect in known_defects() if remover_of(defect, [patch])]


@functools.cache
def read_releases() -> dict[str, dict[str, bool | None]]:
    """{release: {id of a defect: whether it has it}}; None where the trees of a release do not show it.

    The sources of each release were asked once (`drift --accept`): a page and a message are made where they are not.
    """
    return json.loads(RELEASES.read_text(encoding="utf-8"))


def write_releases(release: str, path: list[str], file: Path = RELEASES) -> None:
    """Ask the sources in `path` for all defects, and keep the answers as those of `release`."""
    answers = {defect.id: has_defect(defect, path) for defect in known_defects()}
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    table = before | {release: dict(sorted(answers.items()))}
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    read_releases.cache_clear()


def releases_with(defect: Defect) -> list[str]:
    """The known releases that have it, oldest first."""
    return [release for release, answers in read_releases().items() if answers.get(defect.id)]


def span_of(defect: Defect) -> str:
    """The first and the last of these: "0.16.1 to 0.18.2"; '' for none."""
    releases = releases_with(defect)
    return " to ".join(dict.fromkeys((releases[0], releases[-1]))) if releases else ""
