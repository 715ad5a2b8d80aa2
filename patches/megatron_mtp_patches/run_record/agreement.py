"""All ranks apply the same patches. A rank without them would skip a collective and hang the others."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .. import record
from ..engine import PatchError
from ..engine.call import Call
from ..megatrons.installed import describe_mixture
from .provenance import summarize
from .shown_warnings import show_warnings

logger = logging.getLogger(__name__)

# How often the ranks of a process group have compared. A restart in the same process makes a new group, which starts
# from zero as the new ranks do.
_comparisons: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

# How long rank 0 stays for the others to read its answer.
TIME_TO_READ = timedelta(seconds=30)
# How long the others wait for that answer, in timeouts of the process group: rank 0 may wait once for all of them.
TIMEOUTS_FOR_ANSWER = 2


def check_before_model_parallel(call: Call) -> Any:
    """Wraps parallel_state.initialize_model_parallel, which every rank calls once the process group is up."""
    if dist.is_initialized():
        show_warnings()
        mine = record()
        store = _get_default_store()
        if dist.get_world_size() > 1 and dist.get_backend() != "fake" and store is not None:
            count = _comparisons.get(dist.group.WORLD, 0)
            _comparisons[dist.group.WORLD] = count + 1
            name = f"megatron_mtp_patches/{count}"
            # Ranks may come as late as the process group allows them to (its timeout is the store's).
            compare(store, dist.get_rank(), dist.get_world_size(), mine, name, store.timeout)
        if dist.get_rank() == 0:
            logger.warning("megatron_mtp_patches %s", summarize(mine))
            logger.info("megatron_mtp_patches %s", mine)
            if mixture := describe_mixture():
                logger.warning("megatron_mtp_patches: %s", mixture)
    return call.proceed()


def compare(store: Any, rank: int, world_size: int, mine: str, name: str, patience: timedelta) -> None:
    """Raise PatchError on every rank unless all ranks say the same; name the ranks that differ.

    Works through the rendezvous store, not a collective: a rank without the patches is named instead of waited for.
    `name` must be new to the store; nothing is left under it.
    """
    try:
        store.set(f"{name}/rank{rank}", mine)
        if rank == 0:
            difference = _find_difference(store, world_size, name, patience)
            _publish(store, world_size, name, difference)
        else:
            store.wait([f"{name}/difference"], patience * TIMEOUTS_FOR_ANSWER)
            difference = store.get(f"{name}/difference").decode()
            store.set(f"{name}/read{rank}", "")
    except dist.DistNetworkError as error:
        raise PatchError(
            "the rendezvous store went away while ranks compared their patches; see rank 0's log"
        ) from error
    except dist.DistStoreError as error:
        raise PatchError(_describe_missing([0], patience * TIMEOUTS_FOR_ANSWER)) from error
    if difference:
        raise PatchError(difference)


def _find_difference(store: Any, world_size: int, name: str, patience: timedelta) -> str:
    """Describe how the ranks differ; '' where they do not."""
    keys = [f"{name}/rank{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, patience)
    except RuntimeError:  # torch's DistStoreError: a rank is missing
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            return _describe_missing(missing, patience)
    ranks_by_record: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks_by_record.setdefault(store.get(key).decode(), []).append(rank)
    if len(ranks_by_record) == 1:
        return ""
    shared = set.intersection(*(set(text.split()) for text in ranks_by_record))
    records = "".join(
        f"\n  {_name_ranks(ranks)}: {' '.join(word for word in text.split() if word not in shared)}"
        for text, ranks in ranks_by_record.items()
    )
    return (
        f"ranks differ in their patches; give all of them the same megatron-core, the same megatron_mtp_patches and "
        f"the same MEGATRON_MTP_PATCHES:{records}"
    )


def _publish(store: Any, world_size: int, name: str, difference: str) -> None:
    """Tell the other ranks, and stay until all have read it: rank 0 may hold the store and be about to raise."""
    store.set(f"{name}/difference", difference)
    others = [rank for rank in range(1, world_size) if store.check([f"{name}/rank{rank}"])]
    with contextlib.suppress(RuntimeError):  # a rank that has gone reads nothing
        store.wait([f"{name}/read{rank}" for rank in others], TIME_TO_READ)
    with contextlib.suppress(RuntimeError):  # not every kind of store can delete
        for key in ("difference", "rank0", *(f"{what}{rank}" for rank in others for what in ("rank", "read"))):
            store.delete_key(f"{name}/{key}")


def _describe_missing(ranks: list[int], patience: timedelta) -> str:
    return (
        f"{_name_ranks(ranks)} did not report the patches within {patience}: import megatron_mtp_patches on every "
        f"rank, before training, or see the log there for what ended it or took so long"
    )


def _name_ranks(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 1, 2 and 3`; at most 16 of them."""
    names = list(map(str, ranks[:16])) + [f"{len(ranks) - 16} more"] * (len(ranks) > 16)
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"rank {names[0]}"
