"""Ranks as forks of a process that has imported Megatron: starting new ones takes two seconds instead of twenty.

`Ranks` is used by the process that replays. `python -m scripts.replay.ranks DESCRIPTOR RANKS DEVICE` is the one that
forks: it runs pytest in its forks with each list of arguments that comes over the connection of this descriptor.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from scripts.common import process
from scripts.common.forks import fork, wait

# As torchrun sets them: its store, which outlives a rank, is the one that ranks meet in.
TORCHRUN_VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
}


class Ranks:
    """Runs pytest on this many ranks, in `folder`, again and again."""

    def __init__(self, ranks: int, device: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.ranks = ranks
        self.device = device
        self.folder = folder
        self.environment = environment
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None  # the one that forks
        self.connection: Connection

    def run(self, arguments: list[str], should_stop: Callable[[], bool]) -> bool:
        """True if all ranks ended before `should_stop`, which is called several times in a second, was true."""
        from torch.distributed import TCPStore

        if self.process is None:
            self.process = self._start()
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # open until this function returns
        self.connection.send((arguments, str(store.port), self.log))
        while not self.connection.poll(0.1):
            if should_stop():
                self.close()
                return False
        with contextlib.suppress(EOFError):  # it could not import Megatron, see the log
            self.connection.recv()
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(self.ranks), self.device]
        with self.log.open("ab") as log, theirs:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        if self.process is not None:
            self.connection.close()
            process.end(self.process)
            self.process = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(connection: Connection, ranks: int, device: str) -> None:
    """Import Megatron, then start ranks for what comes over the connection, until it is closed."""
    if device == "cpu":  # CUDA does not work in a fork of a process that has asked for it
        os.environ |= process.rank_variables(0, ranks, "0")
        import megatron_mtp_patches.rehearsal.pytest_plugin  # noqa: F401
        from megatron_mtp_patches.megatron_engine import ENGINE
        from megatron_mtp_patches.megatrons.installed import MEGATRON, import_targets

        import_targets(MEGATRON)
        ENGINE.read_sources()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            arguments, port, log = connection.recv()
            pids = [fork(partial(run_pytest, rank, ranks, port, arguments), log) for rank in range(ranks)]
            connection.send(wait(pids, math.inf))


def run_pytest(rank: int, ranks: int, port: str, arguments: list[str]) -> None:
    import pytest

    os.environ |= process.rank_variables(rank, ranks, port) | TORCHRUN_VARIABLES
    sys.argv = ["pytest", *arguments]
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
