"""Run cases on every rank of one release; rank 0 writes what all ranks have seen.

    python -m scripts.compare_releases.run_cases FILE cpu|gpu PATTERN...

MEGATRON_MTP_PATCHES decides what is patched; with "none" 0.19.2 gives upstream's own numbers.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import study

if TYPE_CHECKING:
    from .case import Case


def main() -> None:
    """Run the cases for this number of ranks whose names fit one of the patterns."""
    file, device, *patterns = sys.argv[1:]
    if device == "cpu":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its versions keep norms in other places
        from megatron_mtp_patches import rehearsal

        rehearsal.install()
    import megatron_mtp_patches  # noqa: F401
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl" if dist.is_nccl_available() else "gloo", timeout=timedelta(minutes=10))
    ranks, patched = dist.get_world_size(), os.environ.get("MEGATRON_MTP_PATCHES", "all") != "none"
    release = study.installed_release()
    recorded: dict[str, Any] = {}
    sizes: dict[str, int] | None = None
    for case in cases(ranks):
        if (case.native or patched) and any(fnmatch(case.name, pattern) for pattern in patterns):
            if case.sizes != sizes:
                parallel_state.destroy_model_parallel()
                parallel_state.initialize_model_parallel(**case.sizes, distributed_timeout_minutes=10)
                sizes = case.sizes
            model_parallel_cuda_manual_seed(1)
            numbers: list[Any] = [None] * ranks
            dist.all_gather_object(numbers, case.run())
            cause, kinds = case.differs.get(release, ("", []))
            recorded[case.name] = {"ranks": numbers, "cause": cause, "cause of": kinds}
    if dist.get_rank() == 0:
        about = {"megatron-core": release, **study.versions("torch"), "ranks": ranks}
        Path(file).write_text(json.dumps({**about, "cases": recorded}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def cases(ranks: int) -> list[Case]:
    """The cases for this number of ranks."""
    from . import model_cases, optimizer_cases

    return [case for case in (*optimizer_cases.cases(), *model_cases.cases()) if ranks in case.ranks]


if __name__ == "__main__":
    main()
