"""Run one command, with its output in a file, and end everything that it started when its time is up."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds that a process has to end after SIGTERM
TAIL = 40  # lines
_reservations: list[socket.socket] = []


class Result(NamedTuple):
    """The end of a command.

    Attributes:
        code: its exit code; negative, the signal that ended it; None, it was killed by `run`.
        output: all that it printed.
    """

    code: int | None
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-TAIL:])


def environment(patches: str = "all", **more: str) -> dict[str, str]:
    """The variables of a process that runs this repository's code with these patches (see MEGATRON_MTP_PATCHES).

    It has one thread, so that torch adds in the same order on every machine.
    """
    paths = [str(ROOT / "patches"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "MEGATRON_MTP_PATCHES": patches, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **here, **more}


def free_port() -> str:
    """A port for rank 0 to listen on. As long as this process lives, the kernel gives it to no one who asks for any."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's listener sets it, too
    reservation.bind(("", 0))
    _reservations.append(reservation)
    return str(reservation.getsockname()[1])


def rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The variables that torchrun sets for a rank, all on this machine; rank 0 listens on `port`."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {**{name: str(value) for name, value in here.items()}, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def run(
    command: list[str],
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout: float = math.inf,
    cwd: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run `command` to its end, or kill it and all that it started.

    It is killed after `timeout` seconds, when `should_stop` returns True, and when this function is interrupted.

    Args:
        env: all its variables (default: those of this process).
        log: the file that its output is appended to (default: a temporary one).
        should_stop: is called several times in a second.
    """
    until = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder, (log or Path(folder, "log")).open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < until and not should_stop():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            code = process.poll()
        finally:
            if process.poll() is None:
                end(process)
        return Result(code, Path(output.name).read_bytes()[start:].decode(errors="replace"))


def run_or_exit(command: list[str], env: Mapping[str, str] | None = None, **words: Any) -> str:
    """Run `command` as `run` does and return what it printed; end this process with its last lines where it fails."""
    result = run(command, env, **words)
    if result.code != 0:
        sys.exit(f"{result.tail}\n{' '.join(command)} failed (exit code {result.code}), see above")
    return result.output


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, its group and its descendants: torchrun's ranks lead groups too."""
    import psutil  # not every environment that imports this module has it

    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children(recursive=True)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
            _, family = psutil.wait_procs(family, GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
