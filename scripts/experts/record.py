"""Measure every condition on the ranks of one release; rank 0 writes what it found.

    python -m scripts.experts.record FILE

MEGATRON_MTP_PATCHES decides what is patched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.common.recording import report_measured
from scripts.experts.conditions import LAYOUTS, WITH_REPLICAS, conditions


def main() -> None:
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    import megatron_mtp_patches  # noqa: F401

    record(Path(sys.argv[1]))


def record(file: Path) -> None:
    """Write the norms of each condition, by hand and as reported; how far replicas are apart; and the versions."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rows, apart = list(measure()), dict(train_replicas())
    versions = {name: metadata.version(name) for name in ("megatron-core", "transformer-engine", "torch")}
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"versions": versions, "rows": rows, "replicas apart": apart}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure() -> Iterator[dict[str, Any]]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from scripts.experts.model import initialize
    from scripts.experts.norms import by_hand, reported, why_not

    for layout in LAYOUTS:
        initialize(layout)
        for condition in conditions(layout):
            reason = why_not(condition.optimizer)
            found = {"not run": reason} if reason else {"reported": reported(condition)}
            yield {"condition": str(condition), "by hand": by_hand(condition), **found}
            if dist.get_rank() == 0:
                report_measured(condition)
        parallel_state.destroy_model_parallel()


def train_replicas() -> Iterator[tuple[str, float]]:
    """How far the copies of an expert are apart after training, with all-reduced gradients and with sharded ones."""
    from megatron.core import parallel_state

    from scripts.experts.model import initialize
    from scripts.experts.replicas import largest_difference

    initialize(WITH_REPLICAS)
    for optimizer in ("adam", "distributed optimizer"):
        yield optimizer, largest_difference(optimizer)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
