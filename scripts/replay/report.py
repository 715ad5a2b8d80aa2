"""The replay table: JSON with every test, Markdown with counts for each file, what was fixed, and each cause."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import markdown_pages

from .verdicts import EITHER, FIXED, NEW, NOT_RUN, SKIPPED, STILL, VERDICTS, Verdict

Verdicts = dict[int, dict[str, Verdict]]  # ranks -> test -> verdict


def write(folder: Path, release: str, about: dict[str, str], verdicts: Verdicts) -> None:
    """RELEASE.json and RELEASE.md."""
    folder.mkdir(parents=True, exist_ok=True)
    tests: dict[str, dict[str, list[str]]] = {}
    for ranks, found in verdicts.items():
        for test, verdict in found.items():
            row = [verdict.word, verdict.cause] if verdict.cause else [verdict.word]
            tests.setdefault(test, {})[str(ranks)] = row
    lines = [f" {json.dumps(test)}: {json.dumps(tests[test])}" for test in sorted(tests)]
    record = f'{{\n"about": {json.dumps(about)},\n"tests": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    (folder / f"{release}.json").write_text(record, encoding="utf-8")
    (folder / f"{release}.md").write_text("\n".join(_markdown(release, about, verdicts)) + "\n", encoding="utf-8")


def totals(verdicts: dict[str, Verdict]) -> Counter:
    return Counter(verdict.word for verdict in verdicts.values())


def lost(table: Path, verdicts: Verdicts) -> list[str]:
    """What passed, patched, where `table` (RELEASE.json) was made, and does not here; a line for each."""
    expected = json.loads(table.read_text(encoding="utf-8"))["tests"]
    files = {(ranks, _file(test)) for ranks, found in verdicts.items() for test in found}
    lines = []
    for test, rows in sorted(expected.items()):
        for ranks, (word, *_) in rows.items():
            found = verdicts.get(int(ranks), {}).get(test)
            if word not in (STILL, FIXED) or (int(ranks), _file(test)) not in files:
                continue
            if found is None:
                lines.append(f"{test} on {ranks}: {word} is expected, it was not collected")
            elif found.word not in (STILL, FIXED):
                lines.append(f"{test} on {ranks}: {word} is expected, found: {found.word} ({found.cause})")
    return lines


def _markdown(release: str, about: dict[str, str], verdicts: Verdicts) -> Iterable[str]:
    yield f"# Upstream's unit tests, {release}"
    yield ""
    yield "Made by `scripts/replay_upstream.py`: " + ", ".join(f"{key} {value}" for key, value in about.items()) + "."
    for ranks, found in sorted(verdicts.items()):
        yield from ("", f"## {ranks} rank{'s' * (ranks > 1)}", "")
        files: dict[str, Counter] = {}
        for test, verdict in found.items():
            files.setdefault(_file(test), Counter())[verdict.word] += 1
        rows = [[file, *(counts[word] or "" for word in VERDICTS)] for file, counts in sorted(files.items())]
        counts = totals(found)
        rows.append(["**all**", *(f"**{counts[word]}**" for word in VERDICTS)])
        yield from markdown_pages.table(["file", *VERDICTS], rows, right=range(1, len(VERDICTS) + 1))
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
        yield from markdown_pages.table(["test", "ranks", "failed with"], rows)


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
        yield from markdown_pages.table(header, rows, right=range(2, len(header)))


def _file(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/unit_tests/")


def _short(test: str) -> str:
    return test.removeprefix("tests/unit_tests/")
