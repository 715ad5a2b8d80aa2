"""All ranks apply the same set. One that does not would skip a collective that the others enter, and hang them."""

from __future__ import annotations

import logging
from datetime import timedelta
from itertools import count
from typing import Any

from . import record
from .engine import PatchError

logger = logging.getLogger(__name__)

# Ranks leave init_process_group together, so a rank that has not reported by then runs without the set.
PATIENCE = timedelta(minutes=3)

_checks = count()


def check_before_model_parallel(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps parallel_state.initialize_model_parallel, which every rank calls once the process group is up."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if dist.is_initialized() and dist.get_backend() != "fake":
        if dist.get_world_size() > 1:
            name = f"megatron_mtp_patches/{next(_checks)}"
            compare(_get_default_store(), dist.get_rank(), dist.get_world_size(), record(), name)
        if dist.get_rank() == 0:
            logger.warning("megatron_mtp_patches %s", record())
    return wrapped(*args, **kwargs)


def compare(store: Any, rank: int, world_size: int, mine: str, name: str, patience: timedelta = PATIENCE) -> None:
    """Raise PatchError on every rank unless all ranks say the same; name the ranks that differ.

    Works through the rendezvous store, not a collective: a rank without the set is named instead of waited for.
    """
    store.set(f"{name}/rank{rank}", mine)
    if rank == 0:
        store.set(f"{name}/verdict", _judge(store, world_size, name, patience))
    try:
        store.wait([f"{name}/verdict"], patience * 2)  # rank 0 may wait once for the others
    except RuntimeError as error:  # torch's DistStoreError
        raise PatchError(_describe_missing([0], patience * 2)) from error
    verdict = store.get(f"{name}/verdict").decode()
    if verdict:
        raise PatchError(verdict)


def _judge(store: Any, world_size: int, name: str, patience: timedelta) -> str:
    keys = [f"{name}/rank{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, patience)
    except RuntimeError:  # torch's DistStoreError: somebody is missing
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            return _describe_missing(missing, patience)
    ranks_by_record: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks_by_record.setdefault(store.get(key).decode(), []).append(rank)
    if len(ranks_by_record) == 1:
        return ""
    sets = "".join(f"\n  rank {_list(ranks)}: {text}" for text, ranks in ranks_by_record.items())
    return (
        f"ranks differ in their patches; give all of them the same megatron-core, the same megatron_mtp_patches and "
        f"the same MEGATRON_MTP_PATCHES:{sets}"
    )


def _describe_missing(ranks: list[int], patience: timedelta) -> str:
    return (
        f"rank {_list(ranks)} did not report its patches within {patience}: import megatron_mtp_patches on every rank, "
        f"before training"
    )


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown
