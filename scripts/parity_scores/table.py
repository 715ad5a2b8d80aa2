"""The scores that are kept, and the Markdown of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.common import kept_rows
from scripts.common.markdown import table

from .listed import FOLDER, LISTS, read_rows

SCORES = FOLDER / "scores.json"
# By list and patches: the column, the outcome that is wanted, and the field of a row with the reason why it is another.
WANTED = {
    ("known", "none"): ("known wrong numbers that are named", "named", "not_named"),
    ("known", "all"): ("their runs that are clean with all patches", "clean", "not_clean"),
    ("mutants", "none"): ("mutants that are noticed", "noticed", "not_noticed"),
}


class Score(NamedTuple):
    """What came of a row on a release.

    Attributes:
        list: "known" or "mutants".
        release: of Megatron.
        name: of the defect or of the mutant.
        patches: "none" or "all".
        outcome: of a known wrong number "named", "found" but not named, "not told apart" from what Megatron defines by
            cut, or "not found"; with all patches "clean" if it has no findings but those of declared defects that no
            patch removes, or "not clean"; of a mutant "noticed" or "not noticed". "not trained" where the run ends in
            an error on one rank, or in each cut.
        cuts: that trained. After one in which a mutant is noticed, or the defect named, there are no others.
        refused: {cut: error} of those that did not.
        first: the largest finding of the first cut that has any, and the known defects that explain it.
        seconds: that it took.
    """

    list: str
    release: str
    name: str
    patches: str
    outcome: str
    cuts: list[str]
    refused: dict[str, str]
    first: str
    seconds: int


def read_scores(file: Path = SCORES) -> list[Score]:
    return [Score(**one) for one in kept_rows.read_rows(file)]


def write_scores(scores: Iterable[Score], file: Path = SCORES) -> None:
    """Write the last score of each row, by list, release and patches."""
    last = {(one.list, one.release, one.name, one.patches): one for one in scores}
    order = list(LISTS)
    kept = sorted(last.values(), key=lambda one: (order.index(one.list), one.release, one.patches != "none"))
    kept_rows.write_rows(kept, file)


def make_block(scores: list[Score]) -> str:
    """How many rows of each release came out as wanted, and each other one with its reason."""
    releases = sorted({one.release for one in scores})
    rows = [
        [release, *(_count(_of(scores, release, *key), wanted[1]) for key, wanted in WANTED.items())]
        for release in releases
    ]
    header = ["release", *(column for column, _, _ in WANTED.values())]
    others = [line for release in releases for line in _others(scores, release)]
    return "\n".join([*table(header, rows), "", *others])


def make_sentence(scores: list[Score], release: str) -> str:
    """The scores of a release, for README."""
    noticed, named, clean = (
        _count(_of(scores, release, name, patches), WANTED[name, patches][1])
        for name, patches in (("mutants", "none"), ("known", "none"), ("known", "all"))
    )
    return (
        f"On {release} `parity` noticed {noticed} planted defects and named {named} known ones that depend on the "
        f"layout; with all patches {clean} of these runs were clean ([misses](docs/parity.md#what-it-finds))."
    )


def _of(scores: list[Score], release: str, name: str, patches: str) -> list[Score]:
    return [one for one in scores if (one.release, one.list, one.patches) == (release, name, patches)]


def _count(scores: list[Score], wanted: str) -> str:
    return f"{sum(one.outcome == wanted for one in scores)} of {len(scores)}" if scores else "not run"


def _others(scores: list[Score], release: str) -> Iterator[str]:
    """Yield a line for each row that came out otherwise. Ends this process where a reason is missing."""
    for (name, patches), (_, wanted, field) in WANTED.items():
        others = [one for one in _of(scores, release, name, patches) if one.outcome != wanted]
        reasons = {row["name"]: row.get(field) for row in read_rows(name, release)} if others else {}
        for one in others:
            if not reasons.get(one.name):
                raise SystemExit(
                    f"ci/parity/{name}.toml: say in `{field}` why {one.name} is {one.outcome} on {release}"
                )
            said = f"{one.outcome} with all patches" if patches == "all" else one.outcome
            yield f"* {release}, {one.name}: {said}: {reasons[one.name]}."
