#!/usr/bin/env python3
"""Make a sample of each committed table again, and see that it says what the table says.

    scripts/check_tables.py --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [parity] [bench] [mutants]

The whole tables take from ten minutes to an hour, so a script makes them and they are committed; CI makes a sample:
two cases of ci/parity on the oldest release and the newest, and it must list every case that is declared; the
all-reduces of ci/bench, which are exact on any machine, on the newest; and a few edits of ci/mutants, others with every
commit, which the test that the table names must still see. Ends with 1 where something differs, and says which script
makes that table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pythons import release_and_python

SCRIPTS = Path(__file__).resolve().parent
CI = SCRIPTS.parent / "ci"
CASES = ("optimizer/bf16/data/upstream", "model/detached/bf16")
MUTANTS = 3
Pythons = dict[str, str]


def parity(pythons: Pythons, folder: Path) -> Iterator[str]:
    """What differs in the sample of ci/parity."""
    records = folder / "records"
    oldest, newest = min(pythons), max(pythons)
    chosen = {release: pythons[release] for release in (oldest, newest)}
    code = run("parity.py", chosen, "run", "--ranks", "1", "--out", str(folder), "--records", str(records), *CASES)
    if code:
        yield "numbers differ, or could not be made; see above"
        return
    known = {row["case"]: row for row in read(CI / "parity")["rows"] if row["ranks"] == 1}
    for row in read(folder)["rows"]:
        for release, differences in row["largest differences"].items():
            before = known[row["case"]]["largest differences"][release]
            if before.keys() != differences.keys():
                yield f"{row['case']} on {release}: {differences or 'bitwise'} instead of {before or 'bitwise'}"
    record = json.loads(next(iter(sorted(records.glob("*-1.json"), reverse=True))).read_text(encoding="utf-8"))
    yield from (f"{case} is not in it" for case in record["declared"] if case not in known)


def bench(pythons: Pythons, folder: Path) -> Iterator[str]:
    """What differs in the sample of ci/bench."""
    sizes = ["--ranks", "1", "--parameters", "16", "--starts", "1", "--turns", "1"]
    newest = max(pythons)
    if run("bench.py", {newest: pythons[newest]}, "step", *sizes, "--out", str(folder)):
        yield "steps could not be measured; see above"
        return
    known = {(row["case"], row["release"]): row for row in read(CI / "bench")["step"] if row["ranks"] == 1}
    for row in read(folder)["step"]:
        for side, counts in row["a step"].items():
            before = known[row["case"], row["release"]]["a step"][side]["all_reduces"]
            if before != counts["all_reduces"]:
                where = f"{row['case']} on {row['release']}, {side}"
                yield f"{where}: {counts['all_reduces']} all-reduces instead of {before}"


def mutants(pythons: Pythons, folder: Path) -> Iterator[str]:
    """What differs in the sample of ci/mutants."""
    if run("mutate.py", {"0.18.2": pythons["0.18.2"]}, "--sample", str(MUTANTS), "--out", str(folder)):
        yield "an edit that is left out goes unseen; see above"


# Each table, and what makes it.
TABLES: dict[str, tuple[Callable[[Pythons, Path], Iterator[str]], str]] = {
    "parity": (parity, "scripts/parity.py run"),
    "bench": (bench, "scripts/bench.py step import"),
    "mutants": (mutants, "scripts/mutate.py"),
}


def run(script: str, pythons: Pythons, *words: str) -> int:
    given = [f"--python={release}={python}" for release, python in pythons.items()]
    first, *rest = words
    command = [first, *given, *rest] if script == "parity.py" else [*words, *given]
    return subprocess.run([sys.executable, str(SCRIPTS / script), *command]).returncode


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=release_and_python, action="append", required=True, metavar="RELEASE=PYTHON")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; without one, all")
    options = parser.parse_args()
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    wrong = []
    for name in options.tables or TABLES:
        check, maker = TABLES[name]
        with tempfile.TemporaryDirectory() as folder:
            wrong += [f"ci/{name}: {text}; {maker} makes it" for text in check(dict(options.python), Path(folder))]
    print("\n".join(wrong) or "the samples say what the tables say")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
