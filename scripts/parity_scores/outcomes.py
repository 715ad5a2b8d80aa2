"""What came of a row of one of the lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .table import Score

if TYPE_CHECKING:
    from megatron_mtp_patches.parity.study import Result


def describe(
    row: dict[str, Any], release: str, patches: str, is_mutant: bool, results: list[Result], error: str, seconds: float
) -> Score:
    """The score of a row, whose cuts have these results."""
    differing = [one for one in results if one.findings]
    if is_mutant:
        outcome = "noticed" if differing else "not noticed"
    elif patches == "none":
        beside = {defect.id for one in results for defect in one.not_told_apart}
        unfound = "not told apart" if row["name"] in beside else "not found"
        outcome = "named" if _is_named(row["name"], differing) else "found" if differing else unfound
    else:
        outcome = "clean" if all(map(is_declared_to_stay, differing)) else "not clean"
    trained = [one.cut.name for one in results if one.verdict is not None]
    refused = {one.cut.name: one.refusal for one in results if one.verdict is None}
    if error or not trained:
        outcome, refused = "not trained", {**({"one rank": error} if error else {}), **refused}
    kind = "mutants" if is_mutant else "known"
    return Score(kind, release, row["name"], patches, outcome, trained, refused, _first(differing), round(seconds))


def is_decided(row: dict[str, Any], patches: str, is_mutant: bool, results: list[Result]) -> bool:
    """True if other cuts cannot change what comes of a row: a mutant is noticed, or an unpatched case is named."""
    differing = [one for one in results if one.findings]
    return bool(differing) if is_mutant else patches == "none" and _is_named(row["name"], differing)


def _is_named(name: str, differing: list[Result]) -> bool:
    return name in {explanation.defect.id for one in differing for explanation in one.explanations}


def is_declared_to_stay(result: Result) -> bool:
    """True if what explains the findings of a cut are known defects that no patch removes."""
    defects = [explanation.defect for explanation in result.explanations]
    return bool(defects) and not any(defect.patch for defect in defects)


def _first(differing: Iterable[Result]) -> str:
    """The largest deviation of the first cut that has one, and the known defects that explain it."""
    for one in differing:
        deviation, names = one.findings[0], [explanation.defect.id for explanation in one.explanations]
        text = f"{one.cut.name}: {deviation.kind} {deviation.name}, step {deviation.step}, by {deviation.size:.2g}"
        return f"{text} ({', '.join(names)})" if names else text
    return ""
