"""Layer 5: NCCL process groups run on gloo.

gloo can sum, average, scatter and send whatever Megatron asks of NCCL, except for two operations that this file adds:
NCCL's premultiplied sum (Megatron-FSDP), and all_gather into a list of unequal sizes (layer-wise optimizers). All
groups share one device, coalesced collectives finish with their block, and a caller may wait for a message twice. int16
and fp8 tensors cannot be reduced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d


class PremultipliedSum:
    """Stands for NCCL's reduction that scales each rank's input before the sum."""

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor


class _Finished:
    """The handle of an asynchronous collective that has finished."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _WaitOnce:
    """The handle of a message. Ring attention waits for it twice; gloo would then wait for another message."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._finished = False

    def wait(self, *timeout: Any) -> bool:
        if not self._finished:
            self._work.wait(*timeout)
            self._finished = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install() -> None:
    """Replace the c10d functions, in both modules from which callers import them."""
    c10d.ProcessGroupGloo = _gloo_on_one_device()
    replacements = {
        "init_process_group": _on_gloo(c10d.init_process_group, default_backend="gloo"),
        "new_group": _on_gloo(c10d.new_group, default_backend=None),
        "_make_nccl_premul_sum": PremultipliedSum,
        "all_reduce": _with_premultiplied_sum(c10d.all_reduce, _scale_all_reduce),
        "reduce_scatter_tensor": _with_premultiplied_sum(c10d.reduce_scatter_tensor, _scale_reduce_scatter),
        "all_gather": _with_unequal_sizes(c10d.all_gather),
        "isend": _with_one_wait(c10d.isend),
        "irecv": _with_one_wait(c10d.irecv),
        "_coalescing_manager": _finishing_with_block(c10d._coalescing_manager),
    }
    for name, replacement in replacements.items():
        setattr(distributed, name, replacement)
        setattr(c10d, name, replacement)


def _gloo_on_one_device() -> type:
    """Make a gloo backend that puts all groups of a process on one device.

    A device has a thread that wakes a hundred times a second. gloo makes one device for each group, and Megatron makes
    thirty groups.
    """
    gloo = c10d.ProcessGroupGloo

    @functools.cache
    def gloo_device(process: int) -> Any:  # a fork does not inherit the thread
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    class ProcessGroupGloo(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any = c10d.default_pg_timeout, **_: Any) -> None:
            options = gloo._Options()
            options._devices = [gloo_device(os.getpid())]
            options._timeout = timeout
            options._threads = 1  # collectives run in the order of their calls
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo


def _on_gloo(create: Any, default_backend: str | None) -> Any:
    """Make `create` use gloo, and drop options that describe NCCL or a GPU."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_on_gloo(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments.pop("pg_options", None)
        arguments.pop("device_id", None)
        backend = arguments.get("backend") or default_backend
        arguments["backend"] = "gloo" if "nccl" in str(backend).lower() else backend
        return create(**arguments)

    return create_on_gloo


def _with_premultiplied_sum(collective: Any, scale: Any) -> Any:
    """Make `collective` scale its input before a sum, if it is given a PremultipliedSum."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, PremultipliedSum) for value in (*args, *kwargs.values())):
            return collective(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        scale(arguments, arguments["op"].factor)
        arguments["op"] = distributed.ReduceOp.SUM
        return collective(**arguments)

    return scaled


def _scale_all_reduce(arguments: dict[str, Any], factor: Any) -> None:
    arguments["tensor"].mul_(factor)


def _scale_reduce_scatter(arguments: dict[str, Any], factor: Any) -> None:
    arguments["input"] = arguments["input"] * factor


def _with_one_wait(send_or_receive: Any) -> Any:
    @functools.wraps(send_or_receive)
    def start(*args: Any, **kwargs: Any) -> Any:
        work = send_or_receive(*args, **kwargs)
        return None if work is None else _WaitOnce(work)

    return start


def _finishing_with_block(coalescing_manager: Any) -> Any:
    """Make coalesced collectives finish with their block, as everything that runs on a stream here does.

    Megatron-FSDP frees buckets while others are in flight, and waits for one handle once for each bucket. gloo's
    reduce-scatter writes its result at each wait: the second wait would overwrite newer values.
    """

    @contextlib.contextmanager
    @functools.wraps(coalescing_manager)
    def manage(*args: Any, **kwargs: Any) -> Any:
        with coalescing_manager(*args, **kwargs) as manager:
            yield manager
        manager.wait()
        manager.works.clear()

    return manage


def _with_unequal_sizes(all_gather: Any) -> Any:
    """Make `all_gather` pad every rank's tensor to the largest; a padded gather is synchronous."""

    @functools.wraps(all_gather)
    def gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        sizes = [one.numel() for one in tensor_list]
        if len(set(sizes)) <= 1:
            return all_gather(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        gathered = [torch.empty_like(padded) for _ in sizes]
        all_gather(gathered, padded, group)
        for destination, source, size in zip(tensor_list, gathered, sizes, strict=True):
            destination.detach().copy_(source[:size].view(destination.shape))
        return _Finished() if async_op else None

    return gather
