"""Records the cases with every interpreter, in processes of their own, and puts them into one table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import table
from pythons import REFERENCE

ROOT = Path(__file__).resolve().parents[2]
RECORDED = "recorded "  # begins the line that says which case is done


def run(
    pythons: dict[str, str], ranks: list[int], device: str, patterns: list[str], out: Path, kept: Path | None
) -> bool:
    """Whether every number is as it should be."""
    if REFERENCE not in pythons:
        raise SystemExit(f"--python {REFERENCE}=PYTHON is missing: everything is compared with that release")
    with tempfile.TemporaryDirectory() if kept is None else nullcontext(kept) as folder:
        records = record_all(pythons, ranks, device, patterns, Path(folder))
    rows = [row for number in ranks for row in compare_all(records, list(pythons), number)]
    versions = {release: records[release, ranks[0], True]["torch"] for release in pythons}
    about = {
        "what": f"Largest absolute differences from {REFERENCE}, without the patches (native) or with them (patched), "
        f'of each release with them; "bitwise": none. What a case does: scripts/parity/*_cases.py. {_torch(versions)}.',
        "device": device,
        "torch": versions,
    }
    title = f"The same seeded work on every release, on the {'CPU' if device == 'cpu' else 'GPU'}"
    table.show(rows, list(pythons), title)
    table.write(rows, list(pythons), about, title, out)
    return not any(cell.is_wrong for row in rows for cell in row.cells.values())


def record_all(
    pythons: dict[str, str], ranks: list[int], device: str, patterns: list[str], folder: Path
) -> dict[tuple[str, int, bool], Any]:
    """(release, ranks, patched): record."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    todo = [(release, number, patched) for number in ranks for release in pythons for patched in (True, False)]
    todo = [(release, number, patched) for release, number, patched in todo if patched or release == REFERENCE]
    folder.mkdir(parents=True, exist_ok=True)
    records = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for release, number, patched in todo:
            name = release if patched else f"{release} without patches"
            progress.update(bar, description=f"{name}, {number} rank{'s' * (number > 1)}: starting")
            file = folder / f"{name.replace(' ', '_')}-{number}.json"
            for case in record(pythons[release], number, device, patched, patterns, file):
                progress.update(bar, description=f"{name}, {number} rank{'s' * (number > 1)}: {case}")
            records[release, number, patched] = table.read(file)
            found = records[release, number, patched]["megatron-core"]
            if release[0].isdigit() and found != release:
                raise SystemExit(f"{pythons[release]} has megatron-core {found}, not {release}")
            progress.advance(bar)
    return records


def record(python: str, ranks: int, device: str, patched: bool, patterns: list[str], file: Path) -> Iterator[str]:
    """Writes `file`; yields the name of each case that is done."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "MEGATRON_MTP_PATCHES": "all" if patched else "none",
        "OMP_NUM_THREADS": "1",  # more would sum in another order
    }
    launcher = [python]
    if ranks > 1 or device == "cuda":  # a rehearsal is its own launcher
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "megatron_mtp_patches"] if device == "cuda" else [str(ROOT / "scripts/parity/rank.py")]
    command = [*launcher, *program, "run", "--device", device]
    command += [str(ROOT / "scripts/parity.py"), "record", str(file.resolve()), *patterns]
    tail: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            if line.startswith(RECORDED):
                yield line.removeprefix(RECORDED).strip()
    if process.returncode:
        sys.exit(f"{''.join(tail)}\n{' '.join(command)} failed")


def compare_all(records: dict[tuple[str, int, bool], Any], releases: list[str], ranks: int) -> list[table.Row]:
    """A row for each case on this number of ranks: against native 0.19.2 if that has the case, else against patched."""
    native, patched = records[REFERENCE, ranks, False], records[REFERENCE, ranks, True]
    only_ours = {name: case for name, case in patched["cases"].items() if name not in native["cases"]}
    against_native = {release: table.compare(native, records[release, ranks, True]) for release in releases}
    against_ours = {
        release: table.compare({**patched, "cases": only_ours}, records[release, ranks, True])
        for release in releases
        if release != REFERENCE
    }
    rows = []
    for name in patched["cases"]:
        word, found = ("patched", against_ours) if name in only_ours else ("native", against_native)
        rows.append(table.Row(name, [ranks], word, {release: found[release][name] for release in found}))
    return rows


def _torch(versions: dict[str, str]) -> str:
    if len(set(versions.values())) == 1:
        return f"torch {next(iter(versions.values()))}"
    return ", ".join(f"torch {version} with {release}" for release, version in versions.items())
