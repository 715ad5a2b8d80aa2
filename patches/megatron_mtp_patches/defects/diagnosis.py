"""Which known defects of the installed Megatron affect a run, and which patch removes each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _engine
from ..catalog import CATALOG
from ..engine import Defect, Patch
from ..engine.source import find_file
from ..engine.state import State
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
    """A defect that affects a run.

    Attributes:
        text: what it does, in a sentence without a full stop.
        releases: the first and the last release that has it.
        patch: the id of the patch that removes it; None if none does.
        is_removed: that patch is applied, or will be as soon as the package that it patches is installed.
        remedy: what to do if the defect is not removed, or not yet; '' if there is nothing to do.
    """

    text: str
    releases: str
    patch: str | None
    is_removed: bool
    remedy: str


def check_version(version: object) -> None:
    """Raise ValueError if this is not a version as 2.16.1 or 2.17.0.dev0+abc."""
    if not isinstance(version, str) or not re.fullmatch(r"\d+(\.\d+)+(\.?(dev|post|rc|a|b)\d*)*(\+[\w.]+)?", version):
        raise ValueError(f"{version!r} is not a version of TransformerEngine: write it as '2.16.1'")


def diagnose(sources: Iterable[object], transformer_engine: str | None) -> list[Finding]:
    """What `find_defects` finds on the installed Megatron and, if no version is given, TransformerEngine.

    Raises:
        TypeError: a source is no object with settings as attributes, or there is none.
        ValueError: `transformer_engine` is not a version.
    """
    sources = tuple(sources)
    wrong = [one for one in sources if one is None or isinstance(one, (type, Mapping, list, tuple, str))]
    if wrong or not sources:
        raise TypeError(
            f"diagnose() takes Megatron's arguments or configurations, not {wrong[0] if wrong else 'nothing'!r}; make "
            f"an object of a mapping with types.SimpleNamespace(**mapping)"
        )
    if transformer_engine is not None:
        check_version(transformer_engine)
    from ..installed_megatron import find_releases, find_transformer_engine

    releases = find_releases()
    if transformer_engine is None:
        transformer_engine, _ = find_transformer_engine(releases)
    return list(find_defects(Settings(sources, transformer_engine), releases))


def find_defects(settings: Settings, releases: frozenset[str]) -> Iterator[Finding]:
    """The defects that affect a run with these settings on a Megatron that is like one of the `releases`."""
    for patch in CATALOG:
        for defect in _met(patch.defects, settings, releases):
            yield _judge(defect, patch)
    for defect in _met(UNPATCHED, settings, releases):
        yield Finding(defect.text, defect.span, None, False, f"no patch: {defect.avoid}")


def _met(defects: Iterable[Defect], settings: Settings, releases: frozenset[str]) -> Iterator[Defect]:
    return (defect for defect in defects if releases.intersection(defect.releases) and defect.affects(settings))


def _judge(defect: Defect, patch: Patch) -> Finding:
    report = _engine.report(patch)
    if report.state is State.DISABLED:
        remedy = f"MEGATRON_MTP_PATCHES leaves {patch.id} out"
    elif report.state is State.REFUSED:
        remedy = f"{patch.id} is refused: {report.reason}"
    elif report.state is State.PENDING and patch.package and not any(map(find_file, patch.modules)):
        return Finding(defect.text, defect.span, patch.id, True, f"it applies once {patch.package} is installed")
    else:
        remedy = ""
    return Finding(defect.text, defect.span, patch.id, not remedy, remedy)
