"""The cases that scripts/parity.py compares, and how they are recorded: the same seeded work on every release."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import model_cases
import optimizer_cases
import torch
import torch.distributed as dist
from case import Case
from megatron.core import package_info, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from runs import RECORDED


def all_cases() -> list[Case]:
    return [*optimizer_cases.cases(), *model_cases.cases()]


def record(file: Path, patterns: list[str]) -> None:
    """Run the cases for this number of ranks whose names fit `patterns`; rank 0 writes what all ranks have seen."""
    dist.init_process_group("nccl" if dist.is_nccl_available() else "gloo", timeout=timedelta(minutes=10))
    ranks, patched = dist.get_world_size(), os.environ.get("MEGATRON_MTP_PATCHES", "all") != "none"
    release = package_info.__version__.partition("+")[0]  # + the commit of whatever repository this is run in
    found: dict[str, Any] = {}
    last = None
    declared = [case for case in all_cases() if ranks in case.ranks and (case.native or patched)]
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
    about: dict[str, Any] = {"megatron-core": release, "torch": torch.__version__.split("+")[0], "ranks": ranks}
    if dist.get_rank() == 0:
        about |= {"patched": patched, "declared": [case.name for case in declared]}
        file.write_text(json.dumps({**about, "cases": found}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def initialize(sizes: dict[str, int], again: bool) -> None:
    """Megatron's process groups of these sizes; the random numbers start anew with every case."""
    if again:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=10)
    model_parallel_cuda_manual_seed(1)
