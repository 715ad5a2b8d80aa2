"""`PYTHON server.py ROOT`: a process that has imported torch, pytest and Megatron, and forks for each run of tests.

Reads a request in JSON from each line of its input, and answers it with a line of JSON. A fork applies the set of the
mutant to the Megatron that is imported already; the overrides it imports from the mutant's copy of the repository, as
do the processes that its tests start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path

KEEP_WAITING = 5  # seconds that the other ranks have once one has failed


def main(root: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare(root)
    answers.write(json.dumps({"effective": effective()}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")


def prepare(root: str) -> None:
    """Import everything but the overrides, and leave Megatron as it is."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MEGATRON_MTP_PATCHES"] = "none"
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    sys.path.insert(0, f"{root}/patches")
    import megatron_mtp_patches
    import megatron_mtp_patches.rehearsal.pytest_plugin
    import pytest  # noqa: F401
    import torch
    from megatron_mtp_patches.engine.source import find_file

    torch.set_num_threads(1)
    for module in megatron_mtp_patches._engine.modules:
        if find_file(module):
            importlib.import_module(module)
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401
    megatron_mtp_patches.revert()
    del os.environ["MEGATRON_MTP_PATCHES"]
    sys.path.remove(f"{root}/patches")
    assert not any(name.partition(".")[0] == "megatron_overrides" for name in sys.modules)
    gc.collect()
    gc.freeze()


class SlowTestsLast:
    """Tests that take the whole set out of Megatron and put it in again run after the others."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: "unpatched" in getattr(item, "fixturenames", ()))


def apply(folder: str, dropped: list) -> None:
    import megatron_mtp_patches
    from megatron_mtp_patches import catalog

    from mutation.mutants import DROP

    os.chdir(folder)
    sys.path[:0] = [f"{folder}/{part}" for part in ("patches", ".", "tests/stand_ins", "scripts/bench")]
    os.environ["PYTHONPATH"] = f"{folder}/patches:{folder}"
    exec(DROP.format(dropped={(patch, position) for patch, position in dropped}), vars(catalog))
    engine = megatron_mtp_patches._engine
    engine.catalog, engine.base = catalog.CATALOG, catalog.BASE
    megatron_mtp_patches.apply()


def effective() -> list:
    """(patch, position) of the edits that do something in this release, read in a fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            apply(str(Path(__file__).resolve().parents[2]), [])
            with os.fdopen(writing, "w") as pipe:
                json.dump(_effective(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    return found


def _effective() -> list:
    from megatron_mtp_patches import _engine
    from megatron_mtp_patches.engine import AddField, Export
    from megatron_mtp_patches.engine.fingerprints import has_place
    from megatron_mtp_patches.engine.slots import MISSING

    installer = _engine.installer

    def does_something(edit) -> bool:
        if edit not in installer._installed or not has_place(edit):
            return False
        if isinstance(edit, AddField):
            fields = getattr(sys.modules[edit.module], edit.name).__dataclass_fields__
            return "added_in_place" in fields[edit.field].metadata
        return not isinstance(edit, Export) or installer._slots[edit.target].original is MISSING

    return [
        (patch.id, position)
        for patch in (*_engine.base, *_engine.catalog)
        for position, edit in enumerate(patch.edits)
        if does_something(edit)
    ]


def run(request: dict) -> dict:
    """{killed: the first failing test or what else ended the run, None if all pass; seconds}"""
    start = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as logs:
        ranks = {}
        for rank in range(max(1, request["ranks"])):
            log = Path(logs, str(rank))
            ranks[fork(request, rank, str(port), log)] = log
        codes = wait(ranks, request["limit"])
        bad = [(code, ranks[pid]) for pid, code in codes.items() if code != 0]
        killed = describe(*bad[0]) if bad else None
    return {"killed": killed, "seconds": round(time.monotonic() - start, 1)}


def fork(request: dict, rank: int, port: str, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if request["ranks"]:
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": str(rank)}
            os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["ranks"])}
        import pytest

        apply(request["folder"], request["dropped"])
        arguments = ["--import-mode=importlib", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *request["tests"]]
        code = pytest.main(arguments, plugins=[SlowTestsLast()])
        sys.stdout.flush()
        os._exit(code)
    except BaseException as error:
        os.write(2, f"ERROR the set does not apply: {error!r}\n".encode())
        os._exit(77)


def wait(ranks: dict[int, Path], limit: float) -> dict[int, int | str]:
    """{process: exit code, the first that ended first}"""
    until = time.monotonic() + limit
    codes: dict[int, int | str] = {}
    while len(codes) < len(ranks) and time.monotonic() < until:
        for pid in ranks.keys() - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    until = min(until, time.monotonic() + KEEP_WAITING)
        time.sleep(0.05)
    for pid in ranks.keys() - codes.keys():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = "timeout"
    return codes


def describe(code: int | str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR "))]
    if failed:
        return failed[0].partition(" ")[2]
    return f"exit {code}: {' '.join(lines[-3:])[-300:]}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(sys.argv[1])
