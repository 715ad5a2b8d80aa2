"""Counts what an MTP head guesses right, and copies the logits that it takes: the bandwidth that there is.

python -m megatron_mtp_patches run scripts/bench/acceptance.py FILE --tokens 8192 --vocabulary 131072
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_overrides.core.transformer.multi_token_prediction.acceptance import _compute_mtp_acceptance_counts

REPEATS, WARM_UP = 20, 3


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    options = parser.parse_args()
    logits = torch.randn(options.tokens, 1, options.vocabulary, dtype=torch.bfloat16, device="cuda")
    labels = torch.randint(options.vocabulary, (1, options.tokens), device="cuda")
    mask, target = torch.ones(1, options.tokens, device="cuda"), torch.empty_like(logits)
    layer: Any = SimpleNamespace(
        gather_output=True
    )  # the logits of the whole vocabulary, as without tensor parallelism
    seconds, copied = [], []
    for number in range(WARM_UP + REPEATS):
        pair = (
            timed(lambda: _compute_mtp_acceptance_counts(logits, labels, mask, layer, None)),
            timed(lambda: target.copy_(logits)),
        )
        if number >= WARM_UP:
            seconds.append(pair[0])
            copied.append(pair[1])
    found = {"tokens": options.tokens, "vocabulary": options.vocabulary, "seconds": seconds, "copy seconds": copied}
    options.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
