"""Find which test notices that a new edit of a patch is missing, on each release, and write ci/noticed_edits.json.

An edit is new where no test is known to notice what it adds. It is looked for in the tests that are marked with its
patch (`pytest.mark.guards`). Ends with 1 if none of these notices one of them. Edits of frameworks are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli.places import TESTS, read_guards

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT, environment
from scripts.common.toml import read_toml
from tests.warm.edits import declared
from tests.warm.noticed import FILE

NOTHING_CHOSEN = 5  # pytest's exit code: the edit changes nothing in this release


def find_new_edits() -> dict[str, set[str]]:
    """Return {what a new edit adds: its patches}; what is put into another class as well is not new there."""
    survivors = read_toml(ROOT / "ci" / "dropped_edits.toml")["survivors"]
    noticed = json.loads((ROOT / FILE).read_text(encoding="utf-8"))
    excused = [name for survivor in survivors for name in survivor["edits"]]
    added = {name.split()[1] for name in (*noticed, *excused)}
    megatrons = {patch.id for patch in CATALOG if not patch.package}
    edits = {name.split()[1]: {patch for patch, _ in some} & megatrons for name, some in declared().items()}
    return {name: patches for name, patches in edits.items() if patches and name not in added}


def main() -> int:
    parser = make_parser("scripts.noticed_edits", __doc__)
    add_pythons(parser)
    options = parser.parse_args()
    guards, edits = read_guards(TESTS), find_new_edits()
    tests = sorted({test for patches in edits.values() for patch in patches for test in guards.get(patch, [])})
    if not tests:
        return 0
    chosen = " or ".join(name.lstrip("-") for name in edits)
    words = ["-m", "pytest", "-q", "--drop-edits", "--everywhere", "-o", "warm_limit=300", "-k", chosen, *tests]
    done = [subprocess.run([python, *words], cwd=ROOT, env=environment()) for python in options.python.values()]
    return int(any(one.returncode not in (0, NOTHING_CHOSEN) for one in done))


if __name__ == "__main__":
    sys.exit(main())
