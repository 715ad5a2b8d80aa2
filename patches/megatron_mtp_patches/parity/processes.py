"""A process that has imported Megatron and the script once, and forks the ranks of each small training."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import megatron_mtp_patches

from ..engine import PatchError
from ..rehearsal.ranks import has_lost_another, run_ranks
from .training import FrameworkRun, Job, Record, train

LIMIT = 300.0  # seconds; only for what hangs
MOST_RANKS = 8
FSDP = {"--use-megatron-fsdp", "--use-torch-fsdp2"}
T = TypeVar("T")


class Failed(NamedTuple):
    """The error with which a training has ended, in a line."""

    error: str


def prepare(script: str | FrameworkRun) -> None:
    """Import torch, and Megatron's trainer with a script, or a framework, in a rehearsal, so that no rank needs to.

    It may be called again for another one.

    Raises:
        PatchError: Megatron has no trainer, or the script or framework cannot be imported.
    """
    _start_rehearsal()
    if isinstance(script, str):
        sys.path[0] = str(Path(script).resolve().parent)
        _import_megatron_trainer()
        _import_script(script)
    else:
        _hide_kernels_from_transformers()
        script.import_trainer()
    megatron_mtp_patches.record()  # reads the sources of Megatron here, not in each fork: 0.3 CPU-seconds


@functools.cache
def _start_rehearsal() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(MOST_RANKS), "RANK": "0"}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from .. import rehearsal

    rehearsal.install()
    import torch

    torch.set_num_threads(1)
    from ..rehearsal import library_kernels

    library_kernels.install()
    if rehearsal.with_transformer_engine():
        import transformer_engine.pytorch  # noqa: F401

        from ..rehearsal.transformer_engine import float32_attention

        float32_attention.allow()


@functools.cache
def _import_megatron_trainer() -> None:
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        raise PatchError(f"parity needs Megatron-LM's trainer: {error}") from error
    remember_docstrings()
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _import_script(script: str) -> None:
    """Import what a training script imports, so that its ranks need not."""
    try:
        runpy.run_path(script, run_name="script_of_parity")
    except Exception as error:
        raise PatchError(f"{script} does not import: {type(error).__name__}: {error}") from error


def _hide_kernels_from_transformers() -> None:
    """Have transformers remember that there are no kernels: it imports more of them than stand-ins have."""
    try:
        from transformers.utils import import_utils
    except ImportError:
        return
    libraries = ("causal_conv1d", "fla", "mamba_ssm")
    stand_ins = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in libraries}
    for name in stand_ins:
        del sys.modules[name]
    for library in ("causal_conv1d", "flash_linear_attention", "mamba_ssm", "mamba_2_ssm"):
        getattr(import_utils, f"is_{library}_available")()
    sys.modules.update(stand_ins)


def remember_docstrings() -> None:
    """Have Megatron's parser read the docstrings of its configurations here, not in each fork: 0.3 CPU-seconds."""
    from megatron.training import argument_utils

    factory = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    docstrings: dict[type, dict[str, str]] = {}

    def remember(self: object, configuration: type) -> dict[str, str]:
        if configuration not in docstrings:
            docstrings[configuration] = read(self, configuration)
        return dict(docstrings[configuration])

    factory._get_field_docstrings = remember


def run(job: Job) -> list[Record] | Failed:
    """Train, and return the records of all ranks, or how it failed."""
    return run_with(job, train)


def run_with(job: Job, train_rank: Callable[[Job], T]) -> list[T] | Failed:
    """Train with this function in the place of `train`, and return what it returns on all ranks, or how one failed."""

    def be_rank() -> bytes:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if FSDP.intersection(job.flags) else "1"
        os.environ["NVTE_APPLY_QK_LAYER_SCALING"] = str(int("--apply-query-key-layer-scaling" in job.flags))
        if job.patches is not None:
            megatron_mtp_patches.revert()
            # This process has gone on without those that are refused.
            megatron_mtp_patches.apply(job.patches, on_drift="warn")
        return pickle.dumps(train_rank(job))  # a tensor would be sent as a file, which this process has to keep

    returned = run_ranks(job.ranks, be_rank, LIMIT)
    failed = min(returned, key=lambda one: (not one.error, has_lost_another(one.error)))
    return Failed(failed.error) if failed.error else [pickle.loads(one.value) for one in returned]
