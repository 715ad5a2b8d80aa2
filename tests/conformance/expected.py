"""The state of each patch in the installed release, by what its declaration says of upstream."""

from __future__ import annotations

from importlib.metadata import version

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatrons.states_by_release import state_in

IDS = [patch.id for patch in CATALOG]
EXPECTED = {patch.id: state_in(patch, version("megatron-core")) for patch in CATALOG}


def is_here(patch: Patch) -> bool:
    """Whether the package that it patches is installed: not every environment has emerging_optimizers."""
    return any(find_file(module) for module in patch.modules)


# The state of each patch in this environment.
STATE = {patch.id: EXPECTED[patch.id] if is_here(patch) else State.PENDING for patch in CATALOG}
