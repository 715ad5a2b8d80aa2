"""Time how rank 0 compares the patches of many ranks at the start of a run, and count the bytes that it reads.

    python -m scripts.bench agreement [--out ci/bench]

The store is a real one on this machine; the other ranks are their keys in it. So each of rank 0's requests takes the
time of a request to a local process: `round trip` says how much, and a cluster adds its own for each of them. Needs
torch.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

from scripts import study
from scripts.common.markdown import Table
from scripts.common.process import ROOT

RANKS = (10, 100, 1_000, 10_000)
ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "bench", help="folder of the table")


def run(options: argparse.Namespace) -> None:
    import megatron_mtp_patches

    mine = megatron_mtp_patches.record()
    rows = []
    for ranks in RANKS:
        times = [measure(ranks, mine, number) for number in range(ROUNDS)]
        seconds, round_trip = (median(column) for column in zip(*times, strict=True))
        rows.append([f"{ranks:,}", f"{seconds:.3f}", f"{1e6 * round_trip:.0f}", f"{ranks * len(mine) / 2**20:.2f}"])
    columns = ["ranks", "seconds of rank 0", "round trip, us", "MiB that it reads"]
    table = Table("Comparing the patches of all ranks", columns, rows, right=range(4))
    table.show()
    about = f"Made by `python -m scripts.bench agreement` with {study.made_with()}; medians of {ROUNDS}."
    (options.out / "agreement.md").write_text(study.page(table.title, [table], about), encoding="utf-8")


def measure(ranks: int, mine: str, number: int) -> tuple[float, float]:
    """(seconds that rank 0 takes once the others have reported, seconds of one request)."""
    from megatron_mtp_patches.agreement import compare
    from torch.distributed import TCPStore

    patience = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    for rank in range(1, ranks):
        store.set(f"{number}/rank{rank}", mine)
        store.set(f"{number}/read{rank}", "")
    begin = time.perf_counter()
    for rank in range(1, min(ranks, 100)):
        store.get(f"{number}/rank{rank}")
    round_trip = (time.perf_counter() - begin) / (min(ranks, 100) - 1)
    begin = time.perf_counter()
    compare(store, 0, ranks, mine, str(number), patience)
    return time.perf_counter() - begin, round_trip
