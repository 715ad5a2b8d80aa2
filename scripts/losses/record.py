"""Compare every condition with the reference, on the ranks of one release; rank 0 writes what it found.

python -m scripts.losses.record FILE
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

from scripts.common.recording import report_measured
from scripts.losses.conditions import LAYOUTS, conditions


def main() -> None:
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    import megatron_mtp_patches  # noqa: F401

    record(Path(sys.argv[1]))


def record(file: Path) -> None:
    """Write {condition: [difference of the loss, difference of the gradient]}, the largest of all ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from scripts.losses.measured import difference

    dist.init_process_group("gloo")
    found = {}
    for layout in LAYOUTS:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor, context_parallel_size=layout.context
        )
        for dtype in ("float32", "bfloat16"):
            for condition in conditions(layout, dtype):
                largest = torch.tensor(difference(condition))
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                found[str(condition)] = largest.tolist()
        if dist.get_rank() == 0:
            report_measured(layout)
        parallel_state.destroy_model_parallel()
    versions = {name: metadata.version(name) for name in ("megatron-core", "torch")}
    if dist.get_rank() == 0:
        file.write_text(json.dumps({"versions": versions, "found": found}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
