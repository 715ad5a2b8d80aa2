"""Run one command, with its output in a file, and end everything that it started when its time is up."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds that a process has to end after SIGTERM
TAIL = 40  # lines
FIRST_PORT, PORTS = 15000, 17000
_ports_asked_for = itertools.count()
_reservations: deque[socket.socket] = deque(maxlen=32)  # by then rank 0 listens on the oldest port


class Result(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code; negative, the signal that ended it; None, it was killed by `run`.
        output: all that it printed.
    """

    code: int | None
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-TAIL:])


def environment(patches: str = "all", one_thread: bool = True, **more: str) -> dict[str, str]:
    """The variables of a process that runs this repository's code with these patches (see MEGATRON_MTP_PATCHES).

    With `one_thread` torch adds in the same order on every machine.
    """
    paths = [str(ROOT / "patches"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "MEGATRON_MTP_PATCHES": patches}
    return {**os.environ, **here, **({"OMP_NUM_THREADS": "1"} if one_thread else {}), **more}


def free_port() -> str:
    """A port of this machine that nothing listens on and that no other process has got from this function.

    It is below those that the kernel gives to outgoing connections, one of which could take it before it is used.
    Until rank 0 listens, a UDP socket of the same number keeps it for this process.
    """
    while True:
        port = FIRST_PORT + (16 * os.getpid() + next(_ports_asked_for)) % PORTS
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, suppress(OSError):
            reservation.bind(("localhost", port))
            probe.bind(("localhost", port))
            _reservations.append(reservation)
            return str(port)
        reservation.close()


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
    on_line: Callable[[str], object] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run `command` to its end, or kill it and all that it started.

    It is killed after `timeout` seconds, when `should_stop` returns True, and when this function is interrupted.

    Args:
        env: all its variables (default: those of this process).
        log: the file that its output is appended to (default: a temporary one).
        on_line: is given each line that it prints.
        should_stop: is called several times in a second.
    """
    until = time.monotonic() + timeout
    rest = b""

    def follow() -> None:
        nonlocal rest
        *lines, rest = (rest + printed.read()).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))

    with (
        tempfile.TemporaryDirectory() as folder,
        (log or Path(folder, "log")).open("ab") as output,
        Path(output.name).open("rb") as printed,
    ):
        start = printed.seek(output.tell())
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < until and not should_stop():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                follow()
            code = process.poll()
        finally:
            if process.poll() is None:
                end(process)
        follow()
        printed.seek(start)
        return Result(code, printed.read().decode(errors="replace"))


def run_or_exit(command: list[str], env: Mapping[str, str] | None = None, **words: Any) -> str:
    """Run `command` as `run` does and return what it printed; end this process with its last lines where it fails."""
    result = run(command, env, **words)
    if result.code != 0:
        sys.exit(f"{result.tail}\n{' '.join(command)} failed (exit code {result.code}), see above")
    return result.output


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, its group and its descendants: torchrun's ranks lead groups too."""
    family = [process.pid, *_descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _descendants(pid: int) -> list[int]:
    """What Linux knows of the processes there are; elsewhere none."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]
