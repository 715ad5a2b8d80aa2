"""The replay table: JSON with the tests that pass and the causes of the rest, Markdown with counts for each file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.markdown import Table

from .verdicts import EITHER, FIXED, NEW, NOT_RUN, SKIPPED, STILL, VERDICTS, Verdict

Verdicts = dict[int, dict[str, Verdict]]  # ranks -> test -> verdict
PASSING = (STILL, FIXED)


def write(
    folder: Path,
    release: str,
    about: dict[str, str],
    verdicts: Verdicts,
    left_out: dict[str, list[str]],
    other: Path | None = None,
) -> None:
    """Write RELEASE.json and RELEASE.md.

    Args:
        left_out: {reason: files}.
        other: has the tables without TransformerEngine, to compare with.
    """
    passing: dict[str, dict[str, list[str]]] = {}
    for test in sorted({test for found in verdicts.values() for test in found}):
        ranks = [ranks for ranks, found in sorted(verdicts.items()) if test in found and found[test].word in PASSING]
        if ranks:
            passing.setdefault(_file(test), {}).setdefault(", ".join(map(str, ranks)), []).append(_name(test))
    record = {
        "about": about,
        "totals": {ranks: {word: totals(found)[word] for word in VERDICTS} for ranks, found in verdicts.items()},
        "causes of the rest": {ranks: _counted_causes(found) for ranks, found in verdicts.items()},
        "passing with the patches": passing,
    }
    tables = [*(_counts(ranks, found) for ranks, found in sorted(verdicts.items()))]
    tables += [_tests(word, verdicts) for word in (NEW, FIXED)]
    tables += [_causes(word, verdicts) for word in (EITHER, SKIPPED, NOT_RUN)]
    rows = [[reason, ", ".join(files)] for reason, files in left_out.items() if files]
    tables.append(Table("Left out", ["why", "files"], rows))
    if other and (other / f"{release}.json").is_file():
        earlier = json.loads((other / f"{release}.json").read_text(encoding="utf-8"))
        tables.append(_beside(passing_tests(earlier), passing_tests(record)))
    origin = "Made by `python -m scripts.replay`: " + ", ".join(f"{key} {value}" for key, value in about.items()) + "."
    tables = [table for table in tables if table.rows]
    study.write(folder / release, record, f"Upstream's unit tests, {release}", tables, origin)


def totals(verdicts: dict[str, Verdict]) -> Counter[str]:
    return Counter(verdict.word for verdict in verdicts.values())


def make_table(release: str, verdicts: Verdicts) -> Table:
    """Return the table for the terminal: how many tests have which verdict."""
    counts = {ranks: totals(found) for ranks, found in verdicts.items()}
    rows = [[str(ranks), *(str(one[word]) for word in VERDICTS)] for ranks, one in counts.items()]
    bad = [number for number, one in enumerate(counts.values()) if one[NEW]]
    return Table(f"{release}: upstream's unit tests, plain -> patched", ["ranks", *VERDICTS], rows, bad=bad)


def lost(file: Path, verdicts: Verdicts) -> list[str]:
    """List what passed with the patches when `file` (RELEASE.json) was written, and does not pass here."""
    files = {(ranks, _file(test)) for ranks, found in verdicts.items() for test in found}
    short = {ranks: {_short(test): verdict for test, verdict in found.items()} for ranks, found in verdicts.items()}
    lines = []
    for ranks, tests in passing_tests(json.loads(file.read_text(encoding="utf-8"))).items():
        for test in sorted(tests):
            found = short.get(ranks, {}).get(test)
            if (ranks, _file(test)) not in files:
                continue
            if found is None:
                lines.append(f"{test} on {ranks}: it passed in the table, it was not collected")
            elif found.word not in PASSING:
                lines.append(f"{test} on {ranks}: it passed in the table, now: {found.word} ({found.cause})")
    return lines


def passing_tests(record: dict[str, Any]) -> dict[int, set[str]]:
    """Return {ranks: tests that pass with the patches} of a RELEASE.json."""
    tests: dict[int, set[str]] = {}
    for test_file, by_ranks in record["passing with the patches"].items():
        for together, names in by_ranks.items():
            for ranks in map(int, together.split(", ")):
                tests.setdefault(ranks, set()).update(f"{test_file}::{name}" for name in names)
    return tests


def _counted_causes(found: dict[str, Verdict]) -> dict[str, dict[str, int]]:
    rest = {word: Counter(one.cause for one in found.values() if one.word == word) for word in VERDICTS}
    return {word: dict(sorted(counts.items())) for word, counts in rest.items() if counts and word not in PASSING}


def _beside(before: dict[int, set[str]], after: dict[int, set[str]]) -> Table:
    """What passes only with TransformerEngine, or only without."""
    both = sorted(before.keys() & after.keys())
    rows = [[str(n), str(len(after[n] - before[n])), str(len(before[n] - after[n]))] for n in both]
    lost = [f"Only without, on {n}: `{test}`." for n in both for test in sorted(before[n] - after[n])]
    columns = ["ranks", "pass with it only", "pass without it only"]
    return Table("Beside the table without TransformerEngine", columns, rows, range(3), note="\n\n".join(lost))


def _counts(ranks: int, verdicts: dict[str, Verdict]) -> Table:
    """How many tests of each file have which verdict."""
    files: dict[str, Counter] = {}
    for test, verdict in verdicts.items():
        files.setdefault(_file(test), Counter())[verdict.word] += 1
    rows = [[file, *(str(counts[word] or "") for word in VERDICTS)] for file, counts in sorted(files.items())]
    rows.append(["**all**", *(f"**{totals(verdicts)[word]}**" for word in VERDICTS)])
    return Table(_ranks(ranks), ["file", *VERDICTS], rows, range(1, len(VERDICTS) + 1))


def _tests(word: str, verdicts: Verdicts) -> Table:
    """The tests of this verdict."""
    tests: dict[tuple[str, str], list[str]] = {}
    for ranks, by_test in sorted(verdicts.items()):
        for test, verdict in by_test.items():
            if verdict.word == word:
                tests.setdefault((test, verdict.cause), []).append(str(ranks))
    rows = [[f"`{_short(test)}`", ", ".join(ranks), cause] for (test, cause), ranks in sorted(tests.items())]
    return Table(word.capitalize(), ["test", "ranks", "failed with"], rows)


def _causes(word: str, verdicts: Verdicts) -> Table:
    """How many tests have this verdict for which cause."""
    causes: dict[str, dict[int, list[str]]] = {}
    for ranks, by_test in verdicts.items():
        for test, verdict in by_test.items():
            if verdict.word == word:
                causes.setdefault(verdict.cause, {}).setdefault(ranks, []).append(test)
    columns = ["cause", "files", *map(_ranks, sorted(verdicts))]
    rows = []
    for cause, tests in sorted(causes.items()):
        files = sorted({Path(_file(test)).name for names in tests.values() for test in names})
        counts = (str(len(tests.get(ranks, [])) or "") for ranks in sorted(verdicts))
        rows.append([cause, ", ".join(files), *counts])
    return Table(f"{word.capitalize()}: why", columns, rows, range(2, len(columns)))


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _file(test: str) -> str:
    return _short(test).partition("::")[0]


def _name(test: str) -> str:
    return test.partition("::")[2]


def _short(test: str) -> str:
    return test.removeprefix("tests/unit_tests/")
