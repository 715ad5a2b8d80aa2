"""The replay table: Markdown with counts for each file, JSON with the tests that pass and the causes of the rest.

Git has the Markdown of ci/replay, and ignores the JSON.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from scripts import study
from scripts.common.markdown import Table

from .verdicts import EITHER, FIXED, NEW, NOT_RUN, PASSING, SKIPPED, STILL, VERDICTS, Verdict

Verdicts = dict[int, dict[str, Verdict]]  # ranks -> test -> verdict
PASS = (STILL, FIXED, PASSING)


def write(
    folder: Path,
    release: str,
    about: dict[str, str],
    verdicts: Verdicts,
    left_out: dict[str, list[str]],
) -> None:
    """Write RELEASE.json and RELEASE.md; `left_out` is {reason: files}."""
    passing: dict[str, dict[str, list[str]]] = {}
    for (test, _), ranks in sorted(_by_test(verdicts, *PASS).items()):
        passing.setdefault(_file(test), {}).setdefault(", ".join(ranks), []).append(test.partition("::")[2])
    record = {
        "about": about,
        "totals": {ranks: {word: totals(tests)[word] for word in VERDICTS} for ranks, tests in verdicts.items()},
        "causes of the rest": {ranks: _counted_causes(tests) for ranks, tests in verdicts.items()},
        "passing with the patches": passing,
    }
    tables = [_counts(ranks, tests) for ranks, tests in sorted(verdicts.items())]
    tables += [_tests(word, verdicts) for word in (NEW, FIXED)]
    tables += [_causes(word, verdicts) for word in (EITHER, SKIPPED, NOT_RUN)]
    rows = [[reason, ", ".join(files)] for reason, files in left_out.items() if files]
    tables.append(Table("Left out", ["why", "files"], rows))
    origin = "Made by `python -m scripts.replay`: " + ", ".join(f"{key} {value}" for key, value in about.items()) + "."
    tables = [table for table in tables if table.rows]
    study.write(folder / release, record, f"Upstream's unit tests, {release}", tables, origin)


def passing_files(page: Path, ranks: int) -> list[str]:
    """The files of which, by a page that `write` wrote, a test passes with the patches on this many ranks."""
    *files, _ = _read_counts(page, ranks)
    return [row["file"] for row in files if any(row.get(word) for word in PASS)]


def read_totals(page: Path, ranks: int) -> dict[str, int]:
    """How many tests have which verdict on this many ranks, by a page that `write` wrote."""
    *_, everything = _read_counts(page, ranks)
    return {word: int(everything[word].strip("*")) for word in VERDICTS}


def _read_counts(page: Path, ranks: int) -> list[dict[str, str]]:
    """The rows that `_counts` made; older pages have no column for PASSING."""
    section = page.read_text(encoding="utf-8").partition(f"## {study.count_ranks(ranks)}\n")[2].partition("\n## ")[0]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.strip().splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def totals(verdicts: dict[str, Verdict]) -> Counter[str]:
    return Counter(verdict.word for verdict in verdicts.values())


def make_table(release: str, verdicts: Verdicts) -> Table:
    """Return the table for the terminal: how many tests have which verdict."""
    counts = {ranks: totals(tests) for ranks, tests in verdicts.items()}
    rows = [[str(ranks), *(str(one[word]) for word in VERDICTS)] for ranks, one in counts.items()]
    bad = [number for number, one in enumerate(counts.values()) if one[NEW]]
    return Table(f"{release}: upstream's unit tests, plain -> patched", ["ranks", *VERDICTS], rows, bad=bad)


def _counted_causes(tests: dict[str, Verdict]) -> dict[str, dict[str, int]]:
    rest = {word: Counter(one.cause for one in tests.values() if one.word == word) for word in VERDICTS}
    return {word: dict(sorted(counts.items())) for word, counts in rest.items() if counts and word not in PASS}


def _counts(ranks: int, verdicts: dict[str, Verdict]) -> Table:
    """The number of tests with each verdict, by file."""
    files: dict[str, Counter] = {}
    for test, verdict in verdicts.items():
        files.setdefault(_file(test), Counter())[verdict.word] += 1
    rows = [[file, *(str(counts[word] or "") for word in VERDICTS)] for file, counts in sorted(files.items())]
    rows.append(["**all**", *(f"**{totals(verdicts)[word]}**" for word in VERDICTS)])
    return Table(study.count_ranks(ranks), ["file", *VERDICTS], rows, range(1, len(VERDICTS) + 1))


def _by_test(verdicts: Verdicts, *words: str) -> dict[tuple[str, str], list[str]]:
    """{(test, cause): on which ranks} of the tests with one of these verdicts; what passes has no cause here."""
    tests: dict[tuple[str, str], list[str]] = {}
    for ranks, by_test in sorted(verdicts.items()):
        for test, verdict in by_test.items():
            if verdict.word in words:
                cause = "" if words == PASS else verdict.cause
                tests.setdefault((test, cause), []).append(str(ranks))
    return tests


def _tests(word: str, verdicts: Verdicts) -> Table:
    """The tests of this verdict."""
    tests = sorted(_by_test(verdicts, word).items())
    rows = [[f"`{_short(test)}`", ", ".join(ranks), cause] for (test, cause), ranks in tests]
    return Table(word.capitalize(), ["test", "ranks", "failed with"], rows)


def _causes(word: str, verdicts: Verdicts) -> Table:
    """The number of tests with this verdict, by cause."""
    files: dict[str, set[str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for (test, cause), ranks in _by_test(verdicts, word).items():
        files.setdefault(cause, set()).add(Path(_file(test)).name)
        counts.update((cause, number) for number in ranks)
    rows = [
        [cause, ", ".join(sorted(names)), *(str(counts[cause, str(ranks)] or "") for ranks in sorted(verdicts))]
        for cause, names in sorted(files.items())
    ]
    columns = ["cause", "files", *map(study.count_ranks, sorted(verdicts))]
    return Table(f"{word.capitalize()}: why", columns, rows, range(2, len(columns)))


def _file(test: str) -> str:
    return _short(test).partition("::")[0]


def _short(test: str) -> str:
    return test.removeprefix("tests/unit_tests/")
