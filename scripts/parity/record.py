"""Run cases on every rank of one release; rank 0 writes what all ranks have seen.

    python -m scripts.parity.record FILE cpu|gpu PATTERN...

MEGATRON_MTP_PATCHES decides what is patched; with "none" 0.19.2 gives upstream's own numbers.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

RECORDED = "recorded "  # begins the line that says which case is done


def main() -> None:
    file, device, *patterns = sys.argv[1:]
    if device == "cpu":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its versions keep norms in other places
        from megatron_mtp_patches import rehearsal

        rehearsal.install()
    import megatron_mtp_patches  # noqa: F401

    record(Path(file), patterns)


def record(file: Path, patterns: list[str]) -> None:
    """Record the cases for this number of ranks whose names fit `patterns`."""
    import torch
    import torch.distributed as dist
    from megatron.core import package_info

    from . import model_cases, optimizer_cases

    dist.init_process_group("nccl" if dist.is_nccl_available() else "gloo", timeout=timedelta(minutes=10))
    ranks, patched = dist.get_world_size(), os.environ.get("MEGATRON_MTP_PATCHES", "all") != "none"
    release = package_info.__version__.partition("+")[0]  # + the commit of whatever repository this is run in
    cases = [*optimizer_cases.cases(), *model_cases.cases()]
    declared = [case for case in cases if ranks in case.ranks and (case.native or patched)]
    found: dict[str, Any] = {}
    last = None
    for case in declared:
        if any(fnmatch(case.name, pattern) for pattern in patterns):
            initialize(case.sizes, again=case.sizes != last)
            last = case.sizes
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, case.run())
            cause, of = case.differs.get(release, ("", []))
            found[case.name] = {"of ranks": of_ranks, "cause": cause, "cause of": of}
            if dist.get_rank() == 0:
                print(f"{RECORDED}{case.name}", flush=True)
    if dist.get_rank() == 0:
        about = {"megatron-core": release, "torch": torch.__version__.split("+")[0], "ranks": ranks, "patched": patched}
        names = [case.name for case in declared]
        file.write_text(json.dumps({**about, "declared": names, "cases": found}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def initialize(sizes: dict[str, int], again: bool) -> None:
    """Make Megatron's process groups of these sizes; start the random numbers again with every case."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if again:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=10)
    model_parallel_cuda_manual_seed(1)


if __name__ == "__main__":
    main()
