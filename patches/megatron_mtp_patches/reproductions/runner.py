"""Runs a reproduction: imports torch and Megatron once, then forks ranks for Megatron as it is and with the patches."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..rehearsal.ranks import has_lost_another, run_ranks

LIMIT = 60.0  # seconds, after which a program hangs
MOST_RANKS = 4
TOLERANCE = 1e-4  # relative, of numbers
_PACKAGE = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """The values that a program expects and has seen, on the first rank on which they differ, or on rank 0."""

    expected: Any
    seen: Any
    is_right: bool


def program_names() -> list[str]:
    """The modules of all programs, without their package."""
    return sorted(file.stem for file in _PACKAGE.glob("*/programs/*.py") if file.stem != "__init__")


def has_program(identifier: str) -> bool:
    """True if a CPU can show the defect; nothing is imported for it."""
    return program_file(identifier) is not None


def find_program(identifier: str) -> ModuleType | None:
    """The program of a defect; None where a CPU cannot show it."""
    file = program_file(identifier)
    if file is None:
        return None
    return importlib.import_module(".".join((_PACKAGE.name, *file.relative_to(_PACKAGE).with_suffix("").parts)))


def program_file(identifier: str) -> Path | None:
    """The file of that program."""
    return next(_PACKAGE.glob(f"*/programs/{identifier.lower().replace('-', '_')}.py"), None)


def prepare() -> None:
    """Import torch, in a rehearsal, and Megatron without the patches; all forks share this."""
    import megatron_mtp_patches

    from .. import rehearsal
    from ..megatron_engine import ENGINE
    from ..megatrons.installed import MEGATRON, import_targets

    megatron_mtp_patches.revert()
    os.environ |= {"OMP_NUM_THREADS": "1", "MEGATRON_MTP_PATCHES": "none"}
    os.environ |= {"RANK": "0", "LOCAL_WORLD_SIZE": str(MOST_RANKS)}  # as many imaginary devices
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rehearsal.install(megatron_flags=False)
    import torch

    torch.set_num_threads(1)
    import_targets(MEGATRON)
    ENGINE.read_sources()
    del os.environ["MEGATRON_MTP_PATCHES"]


def run(program: ModuleType, patches: str = "none") -> Outcome:
    """Run a program in forks of this process, which `prepare` has made ready.

    Args:
        patches: those to apply, as in MEGATRON_MTP_PATCHES: "all", "none" or ids.
    """
    ranks = getattr(program, "RANKS", 1)

    def be_rank() -> Outcome:
        if patches != "none":
            import megatron_mtp_patches

            megatron_mtp_patches.apply(patches)
        expected, seen = program.reproduce()
        return Outcome(expected, seen, is_same(expected, seen))

    limit, otherwise = getattr(program, "LIMIT", LIMIT), getattr(program, "EXPECTED", "no error")
    outcomes = run_on_ranks(ranks, be_rank, limit, otherwise)
    return min(outcomes, key=lambda outcome: (outcome.is_right, has_lost_another(str(outcome.seen))))


def run_on_ranks(ranks: int, action: Callable[[], Outcome], limit: float, otherwise: Any) -> list[Outcome]:
    """The outcomes of `action`, by rank; an error, or a hang, is what is seen in place of `otherwise`."""
    returned = run_ranks(ranks, action, limit)
    return [Outcome(otherwise, one.error, False) if one.error else one.value for one in returned]


def is_same(expected: Any, seen: Any) -> bool:
    """True if they are equal, numbers within TOLERANCE."""
    if isinstance(expected, (list, tuple)) and isinstance(seen, (list, tuple)):
        return len(expected) == len(seen) and all(map(is_same, expected, seen))
    if isinstance(expected, (int, float)) and isinstance(seen, (int, float)):
        return math.isclose(expected, seen, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3)
    return bool(expected == seen)
