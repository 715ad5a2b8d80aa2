"""Bytes and milliseconds of the losses of MTP heads on one GPU, beside one read of the logits.

    python -m megatron_mtp_patches run --device cuda scripts/bench/losses_on_gpu.py RESULT gpu

Needs the variables of the only rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.bench.losses import LOSSES, Sizes, prepare
from scripts.tiny_gpt import start_process_groups

SIZES = {
    "gpu": Sizes(tokens=4096, vocabulary=131072, hidden=2048, chunk=256, dtype="bfloat16"),
    "cpu": Sizes(tokens=16, vocabulary=128, hidden=16, chunk=8, dtype="bfloat16"),
}
ROUNDS, WARM_UP = 7, 2


def milliseconds(work: Callable[[], object]) -> float:
    """The median between two events, of ROUNDS."""
    taken = []
    for _ in range(WARM_UP + ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return median(taken[WARM_UP:])


def measure(sizes: Sizes) -> dict[str, Any]:
    """One attached head: each loss in chunks, and cross entropy of whole logits.

    Bytes are the most that was allocated, with inputs, the output weight and its gradient.
    """
    rows = []
    for loss, chunk in (("cross_entropy", 0), *((loss, sizes.chunk) for loss in LOSSES)):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = prepare(sizes, loss, depths=1, is_detached=False, chunk_size=chunk)
        ms = milliseconds(step)
        rows.append({"loss": loss, "chunk": chunk, "ms": ms, "peak bytes": torch.cuda.max_memory_allocated() - before})
        del step
    return {"sizes": sizes._asdict(), "one read ms": one_read_of_logits(sizes), "rows": rows}


def one_read_of_logits(sizes: Sizes) -> float:
    """Milliseconds: half of a copy, which reads and writes."""
    logits = torch.randn(sizes.tokens, sizes.vocabulary).to(getattr(torch, sizes.dtype))
    target = torch.empty_like(logits)
    return milliseconds(lambda: target.copy_(logits)) / 2


if __name__ == "__main__":
    result, device = sys.argv[1:]
    start_process_groups()
    torch.set_default_device("cuda")
    Path(result).write_text(json.dumps(measure(SIZES[device])), encoding="utf-8")
    torch.distributed.destroy_process_group()
