"""Make a sample of ci/compare_releases again, and see that it says what the table says. Needs a Python per release.

    python -m scripts.compare_releases.sample --python 0.18.2=PYTHON --python 0.19.2=PYTHON ...

Records two cases on the oldest release and the newest. Ends with 1 where other kinds of number differ than in the
table, and where the table lacks a case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT, environment

from .run_cases import cases

CASES = ("optimizer/bf16/data/upstream", "model/detached/bf16")


def differences(pythons: dict[str, str], folder: Path) -> Iterator[str]:
    words = ["-m", "scripts.compare_releases", "--ranks", "1", "--out", str(folder), *CASES]
    words += [f"--python={release}={pythons[release]}" for release in sorted({min(pythons), max(pythons)})]
    if subprocess.run([sys.executable, *words], env=environment()).returncode:
        yield "numbers differ, or could not be made; see above"
        return
    committed = {row["case"]: row for row in read(ROOT / "ci" / "compare_releases") if row["ranks"] == 1}
    for row in read(folder):
        for release, now in row["largest differences"].items():
            before = committed[row["case"]]["largest differences"][release]
            if before.keys() != now.keys():
                yield f"{row['case']} on {release}: {now or 'bitwise'} instead of {before or 'bitwise'}"
    yield from (f"{case.name} is not in it" for case in cases(ranks=1) if case.name not in committed)


def read(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))["rows"]


def main() -> int:
    parser = make_parser("scripts.compare_releases.sample", __doc__)
    add_pythons(parser)
    with tempfile.TemporaryDirectory() as folder:
        wrong = list(differences(parser.parse_args().python, Path(folder)))
    for text in wrong:
        print(f"ci/compare_releases: {text}; python -m scripts.compare_releases makes it")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
