"""The state of each patch in the installed release, as the table in docs/patches.md says."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.engine.state import State

PAGE = Path(__file__).parents[2] / "docs" / "patches.md"
RELEASE = version("megatron-core")
IDS = [patch.id for patch in CATALOG]


def read_table() -> dict[str, dict[str, State]]:
    """{release: {patch: its state there, once Megatron is imported}}."""
    table = PAGE.read_text(encoding="utf-8").partition(": releases -->")[2].partition("<!-- end -->")[0]
    lines = table.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    _, _, *releases = next(row for row in rows if row[0] == "patch")
    patches = {row[0].strip("[").partition("]")[0].strip("`"): row[2:] for row in rows if row[0].startswith("[`")}
    return {
        release: {name: State(states[number]) for name, states in patches.items()}
        for number, release in enumerate(releases)
    }


def is_here(patch: Patch) -> bool:
    """Whether the package that it patches is installed: not every environment has emerging_optimizers."""
    return any(find_file(module) for module in patch.modules)


STATE_BY_RELEASE = read_table()
EXPECTED = STATE_BY_RELEASE[RELEASE]
assert EXPECTED.keys() >= set(IDS), f"{PAGE} lacks {set(IDS) - EXPECTED.keys()}; run python -m scripts.docs"
# The state of each patch in this environment.
STATE = {patch.id: EXPECTED[patch.id] if is_here(patch) else State.PENDING for patch in CATALOG}
