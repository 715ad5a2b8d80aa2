"""Find which test notices that a new edit of a patch is missing, on each release, and write ci/noticed_edits.json.

An edit is new on a release where neither a test is known to notice it nor the edit to change nothing. It is looked for
in the tests that are marked with its patch (`pytest.mark.guards`) and in those of settings. Ends with 1 if none of
these notices one of them. Edits of frameworks are left out.
"""

from __future__ import annotations

import subprocess
import sys

from megatron_mtp_patches.cli.places import TESTS, read_guards

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT, environment
from tests.warm.dropped_edits import SURVIVORS, read_survivors
from tests.warm.edits import megatron_edits
from tests.warm.noticed import Noticed

SETTINGS = "tests/megatron_overrides/settings"  # its tests notice a flag or a field of any patch
NOTHING_CHOSEN = 5  # pytest's exit code: the edits change nothing in this release


def find_new_edits(release: str) -> dict[str, list[str]]:
    """Return {edit without an answer on this release: the ids of its patches}."""
    noticed, survivors = Noticed(ROOT, release), read_survivors(ROOT / SURVIVORS, release)
    edits = megatron_edits().items()
    return {edit: ids for edit, ids in edits if not noticed.answered(edit) and edit not in survivors}


def find_tests(release: str, python: str) -> int:
    """Look for the tests that notice the new edits of a release; return pytest's exit code."""
    guards, edits = read_guards(TESTS), find_new_edits(release)
    if not edits:
        return 0
    print(f"{release}: which test notices {len(edits)} new edits?", flush=True)
    tests = {test for ids in edits.values() for patch in ids for test in guards.get(patch, [])}
    chosen = " or ".join(edit.split()[1].lstrip("-") for edit in edits)
    words = ["-q", "--drop-edits", "--everywhere", "-o", "warm_limit=300", "-k", chosen, *sorted(tests), SETTINGS]
    return subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, env=environment()).returncode


def main() -> int:
    parser = make_parser("scripts.noticed_edits", __doc__)
    add_pythons(parser)
    options = parser.parse_args()
    codes = [find_tests(release, python) for release, python in options.python.items()]
    return int(any(code not in (0, NOTHING_CHOSEN) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
