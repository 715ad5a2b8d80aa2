"""Count what each rank holds without and with a patch, tensor by tensor, on the installed Megatron; no GPU needed.

    python -m scripts.bench memory [PATCH ...] [--ranks 2] [--layers 4] [--hidden 256] [--json FILE]

Where there is a GPU, also what its allocator has given out in the end, and at most. Needs einops and
TransformerEngine, whose FusedAdam Megatron-FSDP takes (without a GPU a rehearsal stands in for its kernels), or for
tag-mtp-stage-embedding emerging-optimizers.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts import study
from scripts.common.arguments import one_of, positive
from scripts.common.markdown import Table

NEEDS = {
    "fsdp-without-master-weights": ("einops", "transformer_engine"),
    "tag-mtp-stage-embedding": ("emerging_optimizers",),
}
SAME = "This Megatron holds the same without the patch: there is nothing to measure it against."
Rank = dict[str, Any]  # what memory_worker.py writes of a rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"{' or '.join(NEEDS)}; without one, both"
    parser.add_argument("patches", nargs="*", type=one_of(NEEDS), metavar="PATCH", help=text)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU, also where there is a GPU")


def run(options: argparse.Namespace) -> None:
    patches = options.patches or list(NEEDS)
    needed = ["torch", "megatron", *(name for patch in patches for name in NEEDS[patch])]
    if absent := [name for name in needed if find_spec(name) is None]:
        options.error(f"{sys.executable} has no {', '.join(absent)}, which this needs")
    import torch
    from rich.progress import track

    on_cpu = options.cpu or torch.cuda.device_count() < options.ranks
    record: dict[str, dict[str, list[Rank]]] = {patch: {} for patch in patches}
    for patch in track(patches, "Counting", transient=True):
        for side in ("without", "with"):
            case = {"patch": patch, "patched": side == "with", "layers": options.layers, "hidden": options.hidden}
            where = {"ranks": options.ranks, "device": "cpu" if on_cpu else "gpu"}
            patched = "all" if side == "with" else f"-{patch}"
            words = ("scripts.bench.memory_worker", json.dumps({**case, "on_cpu": on_cpu}))
            record[patch][side] = study.measure(sys.executable, *words, patches=patched, **where)
    for patch, sides in record.items():
        compare(patch, sides["without"], sides["with"]).show()
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


def compare(patch: str, before: list[Rank], after: list[Rank]) -> Table:
    """Bytes of each rank without and with the patch."""
    same = all(old["held"] == new["held"] for old, new in zip(before, after, strict=True))
    rows = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        without, patched = ({**one["held"], **one.get("allocator", {})} for one in (old, new))
        for what, number in patched.items():
            theory = None if same else new["saves"].get(what)
            numbers = (without[what], number, without[what] - number)
            cells = [*(f"{one:,}" for one in numbers), "" if theory is None else f"{theory:,}"]
            rows.append([str(rank), what.replace("_", " "), *cells])
    title = f"{patch}, megatron-core {version('megatron-core')}: bytes of each rank"
    note = f"without: {before[0]['note']}; with: {after[0]['note']}" + f"\n{SAME}" * same
    return Table(title, ["rank", "what", "without", "with", "less", "in theory"], rows, range(2, 6), note=note)
