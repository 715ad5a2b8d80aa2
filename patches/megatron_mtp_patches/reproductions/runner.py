"""Runs a reproduction: imports torch and Megatron once, then forks ranks for Megatron as it is and with the patches."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

LIMIT = 60.0  # seconds, after which a program hangs
MOST_RANKS = 4
TOLERANCE = 1e-4  # relative, of numbers
LONGEST_ERROR = 160
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

    outcomes = run_ranks(ranks, be_rank, getattr(program, "LIMIT", LIMIT), getattr(program, "EXPECTED", "no error"))
    return min(outcomes, key=lambda outcome: (outcome.is_right, _has_lost_another(outcome)))


def is_same(expected: Any, seen: Any) -> bool:
    """True if they are equal, numbers within TOLERANCE."""
    if isinstance(expected, (list, tuple)) and isinstance(seen, (list, tuple)):
        return len(expected) == len(seen) and all(map(is_same, expected, seen))
    if isinstance(expected, (int, float)) and isinstance(seen, (int, float)):
        return math.isclose(expected, seen, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3)
    return bool(expected == seen)


def _has_lost_another(outcome: Outcome) -> bool:
    """True if what was seen is only that another rank has ended, which then says why."""
    return "gloo/transport" in str(outcome.seen)


def run_ranks(ranks: int, action: Callable[[], Outcome], limit: float, otherwise: Any) -> list[Outcome]:
    """The outcomes of `action` in forks with the variables of torchrun, by rank.

    An error, or a rank that does not end in time, is what is seen in place of `otherwise`.
    """
    reservation = socket.socket()  # as long as it is open, nobody who asks for any port gets this one
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's listener does
    reservation.bind(("", 0))
    forks = [_fork(rank, ranks, str(reservation.getsockname()[1]), action, otherwise) for rank in range(ranks)]
    until = time.monotonic() + limit
    outcomes = []
    try:
        for _, pipe in forks:
            seconds = max(0.0, until - time.monotonic())
            if not pipe.poll(seconds):
                outcomes.append(Outcome(otherwise, f"nothing within {limit:.0f} s", False))
                continue
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append(Outcome(otherwise, "the process has died", False))
    finally:
        for pid, pipe in forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
        reservation.close()
    return outcomes


def _fork(rank: int, ranks: int, port: str, action: Callable[[], Outcome], otherwise: Any) -> tuple[int, Connection]:
    receiver, sender = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        sender.close()
        return pid, receiver
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        outcome = action()
    except BaseException as error:
        first_line = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0].removesuffix(": ")
        outcome = Outcome(otherwise, first_line[:LONGEST_ERROR], False)
    sender.send(outcome)
    os._exit(0)
