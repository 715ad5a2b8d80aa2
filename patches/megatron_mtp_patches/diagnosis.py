"""Which known defects of the installed Megatron a run meets, and which patch removes each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from . import _engine
from .catalog import CATALOG
from .engine import Defect, Patch
from .engine.state import State
from .unpatched import UNPATCHED

# What Megatron's configurations call differently from its command line.
OTHER_NAMES = {"num_experts": "num_moe_experts"}


class Settings:
    """The settings of a run, as one object: Megatron's arguments, or the configurations of a trainer.

    An attribute is that of the first of the `sources` that has it and is not None; None where there is none.

    Attributes:
        transformer_engine: its version as numbers, (2, 16, 1); () where there is none.
    """

    def __init__(self, sources: Iterable[object], transformer_engine: str | None) -> None:
        self._sources = tuple(sources)
        self.transformer_engine = tuple(map(int, re.findall(r"\d+", transformer_engine or "")[:3]))

    def __getattr__(self, name: str) -> Any:
        names = (name, OTHER_NAMES.get(name, name))
        values = (getattr(source, one, None) for source in self._sources for one in names)
        return next((value for value in values if value is not None), None)


@dataclass(frozen=True)
class Finding:
    """A defect that a run meets.

    Attributes:
        text: what it does, in a sentence without a full stop.
        releases: the first and the last release that has it.
        patch: the id of the patch that removes it; None if none does.
        is_removed: that patch is applied.
        remedy: what to do if the defect is not removed.
    """

    text: str
    releases: str
    patch: str | None
    is_removed: bool
    remedy: str


def diagnose(sources: Iterable[object], transformer_engine: str | None) -> list[Finding]:
    """What `find_defects` finds on the installed Megatron and, if no version is given, TransformerEngine."""
    from .cli.megatron import find_releases, find_transformer_engine

    releases = find_releases()
    if transformer_engine is None:
        transformer_engine, _ = find_transformer_engine(releases)
    return list(find_defects(Settings(sources, transformer_engine), releases))


def find_defects(settings: Settings, releases: frozenset[str]) -> Iterator[Finding]:
    """The defects that a run with these settings meets on a Megatron that is like one of the `releases`."""
    for patch in CATALOG:
        for defect in _met(patch.defects, settings, releases):
            yield _judge(defect, patch)
    for defect in _met(UNPATCHED, settings, releases):
        yield Finding(defect.text, defect.span, None, False, f"no patch: {defect.avoid}")


def _met(defects: Iterable[Defect], settings: Settings, releases: frozenset[str]) -> Iterator[Defect]:
    return (defect for defect in defects if releases.intersection(defect.releases) and defect.meets(settings))


def _judge(defect: Defect, patch: Patch) -> Finding:
    report = _engine.report(patch)
    if report.state is State.DISABLED:
        remedy = f"{patch.id} is left out; MEGATRON_MTP_PATCHES decides"
    elif report.state is State.REFUSED:
        remedy = f"{patch.id} is refused: {report.reason}"
    else:
        remedy = ""
    return Finding(defect.text, defect.span, patch.id, not remedy, remedy)
