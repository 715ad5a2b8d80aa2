"""Make a sample of each committed table again, and see that it says what the table says. Needs a Python per release.

    python -m scripts.docs.samples --python 0.18.2=PYTHON --python 0.19.2=PYTHON ... [compare_releases] [bench]

The whole tables take from ten minutes to an hour, so a script makes them and they are committed; CI makes a sample: two
cases of ci/compare_releases on the oldest release and the newest, and it must list every case that is declared; and the
all-reduces of ci/bench, which are exact on any machine, on the newest. Ends with 1 where something differs, and says
which command makes that table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from scripts.common.arguments import add_pythons, make_parser, one_of
from scripts.common.process import ROOT, environment
from scripts.compare_releases.record import cases

CI = ROOT / "ci"
CASES = ("optimizer/bf16/data/upstream", "model/detached/bf16")


def compare_releases(pythons: dict[str, str], folder: Path) -> Iterator[str]:
    """What differs in the sample of ci/compare_releases."""
    words = ["--ranks", "1", "--out", str(folder), *CASES]
    if run("scripts.compare_releases", pythons, {min(pythons), max(pythons)}, *words):
        yield "numbers differ, or could not be made; see above"
        return
    committed = {row["case"]: row for row in read(CI / "compare_releases")["rows"] if row["ranks"] == 1}
    for row in read(folder)["rows"]:
        for release, differences in row["largest differences"].items():
            before = committed[row["case"]]["largest differences"][release]
            if before.keys() != differences.keys():
                yield f"{row['case']} on {release}: {differences or 'bitwise'} instead of {before or 'bitwise'}"
    yield from (f"{case.name} is not in it" for case in cases(ranks=1) if case.name not in committed)


def bench(pythons: dict[str, str], folder: Path) -> Iterator[str]:
    """What differs in the sample of ci/bench."""
    sizes = ["--ranks", "1", "--parameters", "16", "--starts", "1", "--turns", "1"]
    if run("scripts.bench", pythons, {max(pythons)}, "step", *sizes, "--out", str(folder)):
        yield "steps could not be measured; see above"
        return
    committed = {(row["case"], row["release"]): row for row in read(CI / "bench")["step"] if row["ranks"] == 1}
    for row in read(folder)["step"]:
        for side, counts in row["a step"].items():
            before = committed[row["case"], row["release"]]["a step"][side]["all_reduces"]
            if before != counts["all_reduces"]:
                where = f"{row['case']} on {row['release']}, {side}"
                yield f"{where}: {counts['all_reduces']} all-reduces instead of {before}"


TABLES = {"compare_releases": compare_releases, "bench": bench}


def run(module: str, pythons: dict[str, str], releases: set[str], *words: str) -> int:
    where = [f"--python={release}={pythons[release]}" for release in sorted(releases)]
    command = [sys.executable, "-m", module, *words, *where]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)  # in one go: another table is made at the same time
    return done.returncode


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def compare(pythons: dict[str, str], name: str) -> list[str]:
    """What differs in the sample of this table."""
    with tempfile.TemporaryDirectory() as folder:
        differences = list(TABLES[name](pythons, Path(folder)))
    return [f"ci/{name}: {text}; python -m scripts.{name} makes it" for text in differences]


def main() -> int:
    parser = make_parser("scripts.docs.samples", __doc__)
    add_pythons(parser)
    text = f"{', '.join(TABLES)}; without one, all"
    parser.add_argument("tables", nargs="*", type=one_of(TABLES), metavar="TABLE", help=text)
    options = parser.parse_args()
    with ThreadPoolExecutor() as pool:
        wrong = [
            text for texts in pool.map(partial(compare, options.python), options.tables or TABLES) for text in texts
        ]
    print("\n".join(wrong) or "the samples say what the tables say")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
