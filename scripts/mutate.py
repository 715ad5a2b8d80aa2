#!/usr/bin/env python3
"""Change the code in one place at a time, and see that some test fails.

    scripts/mutate.py --python 0.18.2=PYTHON --python 0.16.1=PYTHON --python 0.19.2=PYTHON [--only PATTERN] [--resume]

A mutant is the repository without one edit of the set (without it in every patch that declares it), or with one
comparison of the code that measures, clips and skips turned round. Its likeliest tests run first: those that mirror the
changed file or name what is changed, then tests/multirank on 2 ranks, the others of tests/megatron_overrides,
conformance and tests/end_to_end; in the releases in which the change matters, until one fails. What survives has its
reason in ci/mutants.toml, or the run ends with 1; with 2 if a test that saw a mutant fails without it too. Writes
ci/mutants.md and ci/mutants.json.

Of tests/conformance only test_the_record_is_in_megatron_s_arguments counts. The others go through the edits that are
declared, or look for a certain one: they say nothing of what it does. Nor do tests of the engine and the command line count, which know no edit of the set.

Run it with a Python that has rich and wrapt. The Pythons given need what `pip install -e .[test]` installs.
"""

from __future__ import annotations

import argparse
import functools
import json
import queue
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

from mutation import mutants, suites, table
from pythons import release_and_python
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
SERVER = Path(__file__).with_name("mutation") / "server.py"


class Server:
    """A warm process of one release."""

    def __init__(self, python: str, log: Path) -> None:
        command = [python, "-W", "ignore", str(SERVER), str(ROOT)]
        self.errors = log.open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, bufsize=1
        )
        self.log = log

    @functools.cached_property
    def effective(self) -> set[tuple[str, int]]:
        """The edits that do something in this release. It is the first that a server says."""
        return {(patch, position) for patch, position in self._answer()["effective"]}

    def run(self, mutant: mutants.Mutant | None, folder: Path, stage: suites.Stage, limit: float) -> dict:
        assert self.effective
        dropped = mutant.dropped if mutant else ()
        request = {"folder": str(folder), "dropped": dropped, "limit": limit}
        assert self.process.stdin
        self.process.stdin.write(json.dumps({**request, "ranks": stage.ranks, "tests": stage.tests}) + "\n")
        return self._answer()

    def matters(self, mutant: mutants.Mutant) -> bool:
        return not mutant.dropped or not self.effective.isdisjoint(mutant.dropped)

    def _answer(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} ended: {self.log.read_text()[-2000:]}")  # type: ignore[index]
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


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
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each with a process of every release")
    parser.add_argument("--stages", default="", help="only these, by name and comma: near,1 rank,2 ranks,...")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds that one run of tests may take")
    parser.add_argument("--out", type=Path, default=ROOT / "ci", help="folder of the tables")
    options = parser.parse_args()
    console = Console()
    wanted = re.compile(options.only)
    everything = [*mutants.without_edits(), *mutants.turned_comparisons()]
    chosen = [mutant for mutant in everything if wanted.search(f"{mutant.name} {mutant.where}")]
    known = table.read(options.out / "mutants.json")
    reasons = read_reasons(ROOT / "ci" / "mutants.toml")
    strangers = reasons.keys() - {mutant.name for mutant in everything}
    if strangers:
        parser.error(f"ci/mutants.toml gives a reason for what is no mutant: {'; '.join(sorted(strangers))}")
    places = {mutant.name: mutant.where for mutant in everything}  # lines move
    rows = {name: {**row, "where": places[name]} for name, row in known.items() if name in places}
    todo = [m for m in chosen if not (options.resume and rows.get(m.name, {}).get("killed"))]
    with tempfile.TemporaryDirectory() as work:
        pool = make_pool(options, Path(work))
        try:
            judge_all(todo, rows, reasons, options, pool, Path(work), console)
            asked = {mutant.name: rows[mutant.name] for mutant in chosen}
            good = confirm(asked, pool, options, Path(work), console)
        finally:
            while not pool.empty():
                for server in pool.get().values():
                    server.close()
    ordered = {mutant.name: rows[mutant.name] for mutant in everything if mutant.name in rows}
    table.write(options.out, ordered)
    return conclude(asked, console) or (0 if good else 2)


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


def make_pool(options: argparse.Namespace, work: Path) -> queue.Queue[dict[str, Server]]:
    """Each entry has a server of every release."""
    pythons = dict(options.python)
    pool: queue.Queue[dict[str, Server]] = queue.Queue()
    for job in range(options.jobs):
        pool.put({release: Server(python, work / f"{release} {job}.log") for release, python in pythons.items()})
    return pool


def confirm(
    rows: dict[str, dict], pool: queue.Queue, options: argparse.Namespace, work: Path, console: Console
) -> bool:
    """Whether the tests that killed something pass without a change: one that fails anyway kills nothing."""
    folder = mutants.copy(None, work / "unchanged")
    killers: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows.values():
        if row["killed"]:
            killers.setdefault((row["release"], row["stage"]), {})[row["killed"].partition(" - ")[0]] = None
    servers = pool.get()
    good = True
    for (release, name), tests in killers.items():
        if release in servers:
            stage = suites.Stage(name, suites.RANKS[name], tuple(tests))
            failed = servers[release].run(None, folder, stage, 4 * options.limit)["killed"]
            console.print(f"{release}, {name}, nothing changed: {failed or f'{len(tests)} tests pass'}", markup=False)
            good &= failed is None
    pool.put(servers)
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
    work: Path,
    console: Console,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(options.jobs) as threads:
        task = progress.add_task("mutants", total=len(todo))

        def one(mutant: mutants.Mutant) -> None:
            servers = pool.get()
            try:
                with tempfile.TemporaryDirectory(dir=work) as folder:
                    row = judge(mutant, mutants.copy(mutant, Path(folder)), servers, options)
            finally:
                pool.put(servers)
            row["reason"] = reasons.get(mutant.name)
            rows[mutant.name] = row
            table.write(options.out, rows)
            fate = f"{row['killed']} ({row['release']}, {row['seconds']} s)" if row["killed"] else table.SURVIVED
            console.print(f"{mutant.name} => {fate}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)

        list(threads.map(one, todo))


def judge(
    mutant: mutants.Mutant, folder: Path, servers: dict[str, Server], options: argparse.Namespace
) -> dict[str, object]:
    """The row of one mutant. Fast tests on all releases come before slow ones."""
    kind = "edit" if mutant.dropped else "comparison"
    row: dict = {"kind": kind, "where": mutant.where, "killed": None, "release": None, "stage": None, "seconds": 0.0}
    row["tried"] = [release for release, server in servers.items() if server.matters(mutant)]
    for stage in selected(options, mutant):
        for release in row["tried"]:
            answer = servers[release].run(mutant, folder, stage, options.limit)
            row["seconds"] = round(row["seconds"] + answer["seconds"], 1)
            if answer["killed"]:
                return {**row, "killed": answer["killed"], "release": release, "stage": stage.name}
    return row


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "patches"))
    sys.exit(main())
