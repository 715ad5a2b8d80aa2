"""A warm process: waits for requests at a socket in a folder, and forks for each.

`python server.py FOLDER PATH...` begins at level "python", with PATH... on its path, and ends with its standard input.
The process of each further level is a fork of the one before, made when it is first asked for.

A request is one line of JSON on a connection to FOLDER/LEVEL:

    {"climb": LEVEL}                  answered {"ready": true} or {"error": TEXT}
    {"ranks": N, "log": FILE, ...}    sent with N file descriptors, one for each rank to report to; the rest is what
                                      inside.py needs. Answered {"pids": [...]} and {"rank": R, "code": C} for each end
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

LONGEST = 1 << 16
LIFE = 0  # the file descriptor that closes when the tests have ended


class WarmProcess:
    """This process at one level."""

    def __init__(self, folder: Path, level: str) -> None:
        self.folder = folder
        self.level = level
        self.running: dict[int, tuple[int, socket.socket]] = {}  # pid -> (rank, the connection of its job)
        self.climbed: set[int] = set()

    def serve(self) -> None:
        """Answer requests until the tests have ended."""
        gc.collect()
        gc.freeze()
        address = self.folder / self.level
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address.with_suffix(".new")))
        listener.listen(64)
        ends, wakeup = socket.socketpair()
        for end in (ends, wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self.own = (listener, ends, wakeup)
        address.with_suffix(".new").rename(address)  # whoever sees the name can connect
        with selectors.DefaultSelector() as selector:
            for source in (listener, ends, LIFE):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if LIFE in ready:
                    self._end_all()
                    return
                if ends in ready:
                    ends.recv(4096)
                    self._reap()
                if listener in ready:
                    self._answer(listener.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        request, descriptors = receive(connection)
        if "climb" in request:
            self._climb(request["climb"], connection)
            connection.close()
            return
        pids = [self._start(rank, request, descriptors, connection) for rank in range(request["ranks"])]
        for descriptor in descriptors:
            os.close(descriptor)
        send(connection, {"pids": pids})
        self.running.update({pid: (rank, connection) for rank, pid in enumerate(pids)})

    def _start(self, rank: int, request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> int:
        def run() -> None:
            self._leave()
            connection.close()
            for number in descriptors:
                if number != descriptors[rank]:
                    os.close(number)
            from tests.warm import inside

            inside.run(rank, request, descriptors[rank])

        from scripts.common.forks import fork

        return fork(run, Path(f"{request['log']}.{rank}"))

    def _climb(self, level: str, connection: socket.socket) -> None:
        child = os.fork()
        if child:
            self.climbed.add(child)
            return
        self._leave()
        code = 0
        try:
            from tests.warm import levels

            levels.climb(level)
            _check_threads(level)
            send(connection, {"ready": True})
            connection.close()
            WarmProcess(self.folder, level).serve()
        except BaseException:
            code = 1
            send(connection, {"error": traceback.format_exc()})
        finally:
            os._exit(code)

    def _leave(self) -> None:
        """What a fork must not share with this process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in self.own:
            end.close()
        for _, connection in self.running.values():
            connection.close()

    def _reap(self) -> None:
        for pid in [*self.running, *self.climbed]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self.climbed.discard(pid)
            if pid in self.running:
                rank, connection = self.running.pop(pid)
                send(connection, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})
                if all(other is not connection for _, other in self.running.values()):
                    connection.close()

    def _end_all(self) -> None:
        """Kill the forks that run tests, and wait for all, so that their processor time counts as this process's."""
        from scripts.common.forks import kill

        for pid in self.running:
            kill(pid)
        for pid in [*self.running, *self.climbed]:
            os.waitpid(pid, 0)


def _check_threads(level: str) -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"level {level} has {threads} threads; forks of it would lose all but one")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # whoever asked has gone


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 16)
    while not data.endswith(b"\n"):
        more = connection.recv(LONGEST)
        if not more:
            return {"ranks": 0}, list(descriptors)
        data += more
    return json.loads(data), list(descriptors)


def main(folder: str, *path: str) -> None:
    sys.path[:] = [*path, *(entry for entry in sys.path[1:] if entry not in path)]
    from tests.warm import levels

    levels.climb("python")
    _check_threads("python")
    WarmProcess(Path(folder), "python").serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
