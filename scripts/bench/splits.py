"""What it costs to split fused weights for Muon, and how a small GPT learns with each split.

    python -m scripts.bench splits [--steps N] [--seeds N] [--lr X] [--only cost|training]

Prints two tables. The first has matrix products, floating-point operations and milliseconds of one update of a weight
of usual size, in float32 on one CPU core (set OMP_NUM_THREADS=1: it is the CPU time of the process). The second has the
loss of small models on held-out text, trained with the same seeds with and without each split. Needs megatron-core 0.17
or later and emerging-optimizers, and ten minutes for each table.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts.common.arguments import positive
from scripts.common.markdown import Table

# Of Qwen3-1.7B the first two, of Qwen3-Next the third: the rows of their matrices, unsplit and split, and the columns.
COLUMNS = 2048
WEIGHTS = {
    "linear_fc1, 2 x 6144": ([12288], [6144] * 2),
    "linear_qkv, 16 heads, 8 groups": ([2048, 1024, 1024], [128] * 32),
    "in_proj of GatedDeltaNet": ([12352], [2048, 2048, 4096, 4096, 32, 32]),
}
NEWTON_SCHULZ_STEPS, TURNS = 5, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--lr", type=float, default=5e-3, help="the largest learning rate (default: 0.005)")
    parser.add_argument("--only", choices=("cost", "training"))


def run(options: argparse.Namespace) -> None:
    from scripts import study

    study.rehearse()
    if options.only != "training":
        costs().show()
    if options.only != "cost":
        from scripts.bench.splits_training import losses

        losses(options.steps, options.seeds, options.lr).show()


def operations(rows: list[int]) -> float:
    """Multiplications and additions of Newton-Schulz for matrices of these rows: X X', its square, that times X."""
    total = 0.0
    for size in rows:
        small, large = sorted((size, COLUMNS))
        total += NEWTON_SCHULZ_STEPS * (4 * small**2 * large + 2 * small**3)
    return total


def costs() -> Table:
    columns = ["weight", "rows", "products", "10^9 operations", "milliseconds"]
    table = []
    for name, sizes in WEIGHTS.items():
        times = measure(name, *sizes)
        for kind, rows, time in zip(("", ", split"), sizes, times, strict=True):
            products = 3 * NEWTON_SCHULZ_STEPS * len(rows)
            table.append([name + kind, str(sum(rows)), str(products), f"{operations(rows) / 1e9:.0f}", f"{time:.0f}"])
    return Table("one update of a fused weight", columns, table, right=range(1, 5))


def measure(name: str, whole: list[int], split: list[int]) -> tuple[float, float]:
    """Milliseconds of CPU time of TensorParallelMuon.orthogonalize, unsplit and split, the least of some turns."""
    import time

    import torch

    from megatron_overrides.muon.fused_rows import FUSED_ROWS, FusedRows

    weights = [torch.nn.Parameter(torch.empty(sum(whole), COLUMNS)) for _ in range(2)]
    is_qkv = len(whole) == 3
    muon = make_muon(weights, is_qkv)
    heads = FusedRows((split[0],), is_each_group_alone=True)
    setattr(weights[1], FUSED_ROWS, heads if is_qkv else FusedRows(tuple(split)))
    gradient = torch.randn(sum(whole), COLUMNS, generator=torch.Generator().manual_seed(1))
    best = [float("inf")] * 2
    for _ in range(TURNS):
        for place, weight in enumerate(weights):
            start = time.process_time()
            with torch.no_grad():
                muon.orthogonalize(weight, gradient)
            best[place] = min(best[place], 1e3 * (time.process_time() - start))
    return best[0], best[1]


def make_muon(weights: list[Any], is_qkv: bool) -> Any:
    try:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    except ImportError:  # 0.17
        from megatron.core.optimizer.muon import TensorParallelMuon
    return TensorParallelMuon(weights, split_qkv=is_qkv, is_qkv_fn=lambda _: True, qkv_split_shapes=[256, 128, 128])
