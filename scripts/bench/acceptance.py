"""Time the counting of an MTP head's accepted tokens against one read of its logits, and against making them.

    python -m scripts.bench acceptance --python 0.19.2=PYTHON [--tokens 8192] [--device gpu] [--out ci/bench]

The newest of the given releases is measured. The time of one read is half that of a copy. The target is a GPU's: a CPU
computes for longer than it reads. The logits are made by a projection, forward and backward. Needs torch and
megatron-core in that Python.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from scripts import study
from scripts.bench import results
from scripts.common.arguments import positive

LIMIT = 1.5  # times one read of the logits
REPEATS, WARM_UP = 20, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    results.add_arguments(parser)
    parser.add_argument("--tokens", type=positive, default=64, help="rows of the logits (default: 64)")
    parser.add_argument("--vocabulary", type=positive, default=131072, help="their columns (default: 131072)")
    parser.add_argument("--hidden", type=positive, default=1024, help="hidden size of the projection (default: 1024)")


def run(options: argparse.Namespace) -> None:
    release = max(options.python)
    python, device = options.python[release], options.device
    shape = {"tokens": options.tokens, "vocabulary": options.vocabulary, "hidden": options.hidden}
    seconds = study.measure(python, "scripts.bench.acceptance", *shape.values(), device=device)
    results.report("acceptance", [row(release, device, shape, **seconds)], options)


def row(
    release: str,
    device: str,
    shape: dict[str, int],
    counting: list[float],
    copying: list[float],
    projecting: list[float],
) -> results.Row:
    taken, read = median(counting), median(copying) / 2  # a copy reads and writes
    ratio = taken / read
    misses = [f"{ratio:.2f} times one read, not at most {LIMIT:g}"] if device == "gpu" and ratio > LIMIT else []
    times = {"ms": 1e3 * taken, "one read ms": 1e3 * read, "share of projection": taken / median(projecting)}
    return {"release": release, "device": device, **shape, **times, "ratio": ratio, "misses": misses}


def count_and_copy(tokens: int, vocabulary: int, hidden: int) -> dict[str, list[float]]:
    """Seconds of counting, of copying the logits and of projecting to them, forward and backward, in turns."""
    import torch

    from megatron_overrides.mtp.metrics.acceptance import _compute_mtp_acceptance_counts

    def timed(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    states = torch.randn(tokens, 1, hidden, **sizes, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, **sizes, requires_grad=True)
    logits = torch.randn(tokens, 1, vocabulary, **sizes)
    labels = torch.randint(vocabulary, (1, tokens), device="cuda")
    mask, target = torch.ones(1, tokens, device="cuda"), torch.empty_like(logits)
    layer: Any = SimpleNamespace(gather_output=True)  # the logits have the whole vocabulary
    counting, copying, projecting = [], [], []
    for _ in range(WARM_UP + REPEATS):
        counting.append(timed(lambda: _compute_mtp_acceptance_counts(logits, labels, mask, layer, None)))
        copying.append(timed(lambda: target.copy_(logits)))
        projecting.append(timed(lambda: (states @ weight.t()).backward(logits)))
    return {"counting": counting[WARM_UP:], "copying": copying[WARM_UP:], "projecting": projecting[WARM_UP:]}


if __name__ == "__main__":
    import sys

    file, *sizes = sys.argv[1:]
    Path(file).write_text(json.dumps(count_and_copy(*map(int, sizes))))
