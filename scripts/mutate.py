#!/usr/bin/env python3
"""Change the code in one place at a time, and see that some test fails.

    scripts/mutate.py --python 0.18.2=PYTHON --python 0.16.1=PYTHON --python 0.19.2=PYTHON [--only PATTERN] [--resume]

A mutant is a warm process whose patches lack one edit (in every patch that declares it), or one comparison of the code
that measures, clips and skips turned round. Its likeliest tests run first: those that mirror the changed file
or name what is changed, then tests/multirank on 2 ranks, the others of tests/megatron_overrides, conformance and
tests/end_to_end; in the releases in which the change matters, until one fails. What survives has its reason in
ci/mutants.toml, or the run ends with 1; with 2 if a test that saw a mutant fails without it too. Writes ci/mutants.md
and ci/mutants.json.

Of tests/conformance only test_the_record_is_in_megatron_s_arguments counts. The others go through the edits that are
declared, or look for a certain one: they say nothing of what it does. Nor do tests of the engine and the command line
count, which know no edit.

Run it with a Python that has rich and wrapt. The Pythons given need what `pip install -e .[test]` installs.
"""

from __future__ import annotations

import argparse
import queue
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

from mutation import mutants, suites, table
from mutation.release import Release
from pythons import release_and_python
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python",
        type=release_and_python,
        action="append",
        required=True,
        metavar="RELEASE=PYTHON",
        help="may be repeated",
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants whose name or place has this in it")
    parser.add_argument(
        "--resume", action="store_true", help="take what ci/mutants.json has of mutants that were killed"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only N edits, others with each commit, and the tests that saw them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each with a process of every release")
    parser.add_argument("--stages", default="", help="only these, by name and comma: near,1 rank,2 ranks,...")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one run of tests may take")
    parser.add_argument("--out", type=Path, default=ROOT / "ci", help="folder of the tables")
    options = parser.parse_args()
    console = Console()
    wanted = re.compile(options.only)
    everything = [*mutants.without_edits(), *mutants.turned_comparisons()]
    chosen = [mutant for mutant in everything if wanted.search(f"{mutant.name} {mutant.where}")]
    known = table.read(ROOT / "ci" / "mutants.json" if options.sample else options.out / "mutants.json")
    reasons = read_reasons(ROOT / "ci" / "mutants.toml")
    strangers = reasons.keys() - {mutant.name for mutant in everything}
    if strangers:
        parser.error(f"ci/mutants.toml gives a reason for what is no mutant: {'; '.join(sorted(strangers))}")
    places = {mutant.name: mutant.where for mutant in everything}  # lines move
    rows = {name: {**row, "where": places[name]} for name, row in known.items() if name in places}
    todo = [m for m in chosen if not (options.resume and rows.get(m.name, {}).get("killed"))]
    if options.sample:
        return check_sample(rows, everything, options, console)
    pool = make_pool(options)
    try:
        judge_all(todo, rows, reasons, options, pool, console)
        asked = {mutant.name: rows[mutant.name] for mutant in chosen}
        good = confirm(asked, pool, options, console)
    finally:
        while not pool.empty():
            for release in pool.get().values():
                release.close()
    ordered = {mutant.name: rows[mutant.name] for mutant in everything if mutant.name in rows}
    table.write(options.out, ordered)
    return conclude(asked, console) or (0 if good else 2)


def check_sample(
    rows: dict[str, dict], everything: list[mutants.Mutant], options: argparse.Namespace, console: Console
) -> int:
    """1 unless the test that the table names for an edit fails without that edit, and passes with it."""
    python_of = dict(options.python)
    seen = [m for m in everything if m.dropped and rows.get(m.name, {}).get("release") in python_of]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    chosen = random.Random(commit).sample(seen, min(options.sample, len(seen)))
    releases = {release: Release(python) for release, python in python_of.items()}
    wrong = []
    for mutant in chosen:
        row = rows[mutant.name]
        stage = suites.Stage(row["stage"], suites.RANKS[row["stage"]], (row["killed"].partition(" - ")[0],))
        without, whole = (releases[row["release"]].run(m, stage, options.limit)["killed"] for m in (mutant, None))
        fate = f"{without or table.SURVIVED}; with it {whole or 'all is well'}"
        console.print(f"{mutant.name} => {fate}", markup=False, highlight=False, soft_wrap=True)
        wrong += [mutant] if whole or not without else []
    for release in releases.values():
        release.close()
    return int(bool(wrong))


def read_reasons(file: Path) -> dict[str, str]:
    """{mutant: why no test can tell it from the code}"""
    data = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {entry["mutant"]: entry["reason"] for entry in data.get("equivalent", ())}


def conclude(rows: dict[str, dict], console: Console) -> int:
    """1 if a mutant survived and nobody has said why."""
    survivors = [name for name, row in rows.items() if row["killed"] is None and not row["reason"]]
    for name in survivors:
        console.print(f"{table.SURVIVED}: {name}", markup=False, style="red", soft_wrap=True)
    killed = sum(row["killed"] is not None for row in rows.values())
    console.print(f"{len(rows)} mutants: {killed} killed, {len(survivors)} survived unexplained")
    return int(bool(survivors))


def make_pool(options: argparse.Namespace) -> queue.Queue[dict[str, Release]]:
    """Each entry has warm processes of every release."""
    pool: queue.Queue[dict[str, Release]] = queue.Queue()
    for _ in range(options.jobs):
        pool.put({release: Release(python) for release, python in dict(options.python).items()})
    return pool


def confirm(rows: dict[str, dict], pool: queue.Queue, options: argparse.Namespace, console: Console) -> bool:
    """Whether the tests that killed something pass without a change: one that fails anyway kills nothing."""
    killers: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows.values():
        if row["killed"]:
            killers.setdefault((row["release"], row["stage"]), {})[row["killed"].partition(" - ")[0]] = None
    releases = pool.get()
    good = True
    for (release, name), tests in killers.items():
        if release in releases:
            stage = suites.Stage(name, suites.RANKS[name], tuple(tests))
            failed = releases[release].run(None, stage, options.limit)["killed"]
            console.print(f"{release}, {name}, nothing changed: {failed or f'{len(tests)} tests pass'}", markup=False)
            good &= failed is None
    pool.put(releases)
    return good


def selected(options: argparse.Namespace, mutant: mutants.Mutant | None) -> list[suites.Stage]:
    names = options.stages.split(",") if options.stages else None
    return [stage for stage in suites.stages(mutant) if names is None or stage.name in names]


def judge_all(
    todo: list[mutants.Mutant],
    rows: dict[str, dict],
    reasons: dict[str, str],
    options: argparse.Namespace,
    pool: queue.Queue,
    console: Console,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(options.jobs) as threads:
        task = progress.add_task("mutants", total=len(todo))

        def one(mutant: mutants.Mutant) -> None:
            releases = pool.get()
            try:
                row = judge(mutant, releases, options)
            finally:
                pool.put(releases)
            row["reason"] = reasons.get(mutant.name)
            rows[mutant.name] = row
            table.write(options.out, rows)
            fate = f"{row['killed']} ({row['release']}, {row['seconds']} s)" if row["killed"] else table.SURVIVED
            console.print(f"{mutant.name} => {fate}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)

        list(threads.map(one, todo))


def judge(mutant: mutants.Mutant, releases: dict[str, Release], options: argparse.Namespace) -> dict[str, object]:
    """The row of one mutant. Fast tests on all releases come before slow ones."""
    kind = "edit" if mutant.dropped else "comparison"
    row: dict = {"kind": kind, "where": mutant.where, "killed": None, "release": None, "stage": None, "seconds": 0.0}
    row["tried"] = [release for release, warm in releases.items() if warm.matters(mutant)]
    for stage in selected(options, mutant):
        for release in row["tried"]:
            answer = releases[release].run(mutant, stage, options.limit)
            row["seconds"] = round(row["seconds"] + answer["seconds"], 1)
            if answer["killed"]:
                return {**row, "killed": answer["killed"], "release": release, "stage": stage.name}
    return row


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "patches"))
    sys.exit(main())
