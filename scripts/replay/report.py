"""The replay table: JSON with the tests that pass and the causes of the rest, Markdown with counts for each file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from scripts.common.markdown import Table, table

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
    folder.mkdir(parents=True, exist_ok=True)
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
    (folder / f"{release}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [*_markdown(release, about, verdicts), *_left_out(left_out)]
    if other and (other / f"{release}.json").is_file():
        lines += _compared(other / f"{release}.json", folder / f"{release}.json")
    (folder / f"{release}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


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
    for ranks, tests in passing_tests(file).items():
        for test in sorted(tests):
            found = short.get(ranks, {}).get(test)
            if (ranks, _file(test)) not in files:
                continue
            if found is None:
                lines.append(f"{test} on {ranks}: it passed in the table, it was not collected")
            elif found.word not in PASSING:
                lines.append(f"{test} on {ranks}: it passed in the table, now: {found.word} ({found.cause})")
    return lines


def passing_tests(file: Path) -> dict[int, set[str]]:
    """Return {ranks: tests that pass with the patches} of a RELEASE.json."""
    found: dict[int, set[str]] = {}
    for test_file, by_ranks in json.loads(file.read_text(encoding="utf-8"))["passing with the patches"].items():
        for together, names in by_ranks.items():
            for ranks in map(int, together.split(", ")):
                found.setdefault(ranks, set()).update(f"{test_file}::{name}" for name in names)
    return found


def _counted_causes(found: dict[str, Verdict]) -> dict[str, dict[str, int]]:
    rest = {word: Counter(one.cause for one in found.values() if one.word == word) for word in VERDICTS}
    return {word: dict(sorted(counts.items())) for word, counts in rest.items() if counts and word not in PASSING}


def _compared(without: Path, file: Path) -> Iterable[str]:
    """Yield the section of what passes only with TransformerEngine, or only without."""
    yield from ("", "## Beside the table without TransformerEngine", "")
    before, after = passing_tests(without), passing_tests(file)
    both = sorted(before.keys() & after.keys())
    rows = [[ranks, len(after[ranks] - before[ranks]), len(before[ranks] - after[ranks])] for ranks in both]
    yield from table(["ranks", "pass with it only", "pass without it only"], rows, right=range(3))
    for ranks in both:
        yield from (f"\nOnly without, on {ranks}: `{test}`." for test in sorted(before[ranks] - after[ranks]))


def _markdown(release: str, about: dict[str, str], verdicts: Verdicts) -> Iterable[str]:
    yield f"# Upstream's unit tests, {release}"
    yield ""
    yield "Made by `python -m scripts.replay`: " + ", ".join(f"{key} {value}" for key, value in about.items()) + "."
    for ranks, found in sorted(verdicts.items()):
        yield from ("", f"## {ranks} rank{'s' * (ranks > 1)}", "")
        files: dict[str, Counter] = {}
        for test, verdict in found.items():
            files.setdefault(_file(test), Counter())[verdict.word] += 1
        rows = [[file, *(counts[word] or "" for word in VERDICTS)] for file, counts in sorted(files.items())]
        counts = totals(found)
        rows.append(["**all**", *(f"**{counts[word]}**" for word in VERDICTS)])
        yield from table(["file", *VERDICTS], rows, right=range(1, len(VERDICTS) + 1))
    for word in (NEW, FIXED):
        yield from _names(word, verdicts)
    for word in (EITHER, SKIPPED, NOT_RUN):
        yield from _causes(word, verdicts)


def _names(word: str, verdicts: Verdicts) -> Iterable[str]:
    tests: dict[tuple[str, str], list[str]] = {}
    for ranks, found in sorted(verdicts.items()):
        for test, verdict in found.items():
            if verdict.word == word:
                tests.setdefault((test, verdict.cause), []).append(str(ranks))
    if tests:
        yield from ("", f"## {word.capitalize()}", "")
        rows = ([f"`{_short(test)}`", ", ".join(ranks), cause] for (test, cause), ranks in sorted(tests.items()))
        yield from table(["test", "ranks", "failed with"], rows)


def _causes(word: str, verdicts: Verdicts) -> Iterable[str]:
    causes: dict[str, dict[int, list[str]]] = {}
    for ranks, found in verdicts.items():
        for test, verdict in found.items():
            if verdict.word == word:
                causes.setdefault(verdict.cause, {}).setdefault(ranks, []).append(test)
    if causes:
        yield from ("", f"## {word.capitalize()}: why", "")
        numbers = sorted(verdicts)
        header = ["cause", "files", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in numbers)]
        rows = []
        for cause, tests in sorted(causes.items()):
            files = sorted({Path(_file(test)).name for names in tests.values() for test in names})
            rows.append([cause, ", ".join(files), *(len(tests.get(ranks, [])) or "" for ranks in numbers)])
        yield from table(header, rows, right=range(2, len(header)))


def _left_out(left_out: dict[str, list[str]]) -> Iterable[str]:
    rows = [[reason, ", ".join(files)] for reason, files in left_out.items() if files]
    if rows:
        yield from ("", "## Left out", "")
        yield from table(["why", "files"], rows)


def _file(test: str) -> str:
    return _short(test).partition("::")[0]


def _name(test: str) -> str:
    return test.partition("::")[2]


def _short(test: str) -> str:
    return test.removeprefix("tests/unit_tests/")
