#!/usr/bin/env python3
"""What a rank holds without and with a patch, counted tensor by tensor, on the installed Megatron; no GPU needed.

Where there is one, also what its allocator has given out in the end, and at most.

    python scripts/bench_memory.py [PATCH ...] [--ranks 2] [--layers 4] [--hidden 256] [--json FILE]

Megatron-FSDP's FusedAdam is TransformerEngine's; without a GPU a rehearsal stands in for its kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))
ROOT = Path(__file__).resolve().parents[1]
NEEDS = {
    "fsdp-without-master-weights": ("einops", "transformer_engine"),
    "tag-mtp-stage-embedding": ("emerging_optimizers",),
}
SIDES = ("without", "with")
NATIVE = "This Megatron holds the same without the patch: there is nothing to measure it against."


def run_rank(options: argparse.Namespace) -> None:
    """One rank of one measurement."""
    from megatron_mtp_patches import rehearsal

    if options.cpu:
        rehearsal.install(megatron_flags=False)
    import torch

    torch.distributed.init_process_group("gloo" if options.cpu else "nccl")
    from memory_cases import CASES

    found = CASES[options.patches[0]](options)
    result = {"held": found.held._asdict(), "saves": found.saves, "note": found.note}
    if not options.cpu:
        result["allocator"] = {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    (options.rank_folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def run_ranks(patch: str, options: argparse.Namespace, before: bool) -> list[dict[str, Any]]:
    """What each rank found."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'patches'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "MEGATRON_MTP_PATCHES": f"-{patch}" if before else "all",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    sizes = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
    switches = ["--cpu"] * options.cpu + ["--before"] * before
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, __file__, patch, *sizes, *switches, "--rank-folder", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{patch}, {' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def show(patch: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{patch}, megatron-core {version('megatron-core')}: bytes of each rank")
    for column in ("rank", "what", "without", "with", "less", "in theory"):
        table.add_column(column, justify="left" if column in ("rank", "what") else "right")
    same = all(old["held"] == new["held"] for old, new in zip(before, after, strict=True))
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for what, number in new["held"].items():
            theory = new["saves"].get(what)
            less = old["held"][what] - number
            expected = "" if theory is None or same else f"{theory:,}"
            table.add_row(
                str(rank), what.replace("_", " "), f"{old['held'][what]:,}", f"{number:,}", f"{less:,}", expected
            )
        for what, number in new.get("allocator", {}).items():
            without = old["allocator"][what]
            table.add_row(str(rank), what, f"{without:,}", f"{number:,}", f"{without - number:,}", "")
        table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print(f"without: {before[0]['note']}; with: {after[0]['note']}", *[NATIVE] * same, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patches", nargs="*", metavar="PATCH", help=f"{' or '.join(NEEDS)}; without one, both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU, also where there is a GPU")
    parser.add_argument("--before", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.patches) - set(NEEDS)
    if unknown:
        parser.error(f"nothing is measured of {', '.join(sorted(unknown))}; choose from {', '.join(NEEDS)}")
    if options.rank_folder:
        run_rank(options)
        return
    options.patches = options.patches or list(NEEDS)
    needed = ["torch", "megatron", *(name for patch in options.patches for name in NEEDS[patch])]
    if absent := [name for name in needed if find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {', '.join(absent)}, which this needs")
    import torch

    options.cpu = options.cpu or torch.cuda.device_count() < options.ranks
    from rich.progress import track

    record: dict[str, dict[str, Any]] = {patch: {} for patch in options.patches}
    for patch, side in track([(patch, side) for patch in record for side in SIDES], "Counting", transient=True):
        record[patch][side] = run_ranks(patch, options, before=side == "without")
    for patch, sides in record.items():
        show(patch, *sides.values())
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
