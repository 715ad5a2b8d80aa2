"""Layer 5: NCCL process groups run on gloo.

gloo itself sums, averages, scatters and sends what Megatron asks of NCCL, except for two things that are
made up here: NCCL's premultiplied sum (Megatron-FSDP) and all_gather into a list of unequal sizes (layer-
wise optimizers). All groups share one device, coalesced collectives end with their block, and what is sent or received
may be waited for again. int16 and fp8 tensors cannot be reduced.
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
    """Stands for NCCL's reduction that scales each rank's input before it adds."""

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor


class _Finished:
    """The handle of an asynchronous collective that already ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Sent:
    """The handle of a message. Ring attention waits for it twice; gloo would wait for another message."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = False

    def wait(self, *timeout: Any) -> bool:
        if not self._ended:
            self._work.wait(*timeout)
            self._ended = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install() -> None:
    """Replace the c10d functions, in both modules that callers take them from."""
    c10d.ProcessGroupGloo = _gloo_on_one_device()
    replacements = {
        "init_process_group": _on_gloo(c10d.init_process_group, default_backend="gloo"),
        "new_group": _on_gloo(c10d.new_group, default_backend=None),
        "_make_nccl_premul_sum": PremultipliedSum,
        "all_reduce": _with_premultiplied_sum(c10d.all_reduce, _scale_all_reduce),
        "reduce_scatter_tensor": _with_premultiplied_sum(c10d.reduce_scatter_tensor, _scale_reduce_scatter),
        "all_gather": _with_unequal_sizes(c10d.all_gather),
        "isend": _waited_for_once(c10d.isend),
        "irecv": _waited_for_once(c10d.irecv),
        "_coalescing_manager": _ending_at_once(c10d._coalescing_manager),
    }
    for name, replacement in replacements.items():
        setattr(distributed, name, replacement)
        setattr(c10d, name, replacement)


def _gloo_on_one_device() -> type:
    """gloo's backend, all of a process's groups on one device.

    A device has a thread that wakes a hundred times a second; gloo makes one for each group, Megatron thirty groups.
    """
    gloo = c10d.ProcessGroupGloo

    @functools.cache
    def device_of(process: int) -> Any:  # a fork does not take the thread along
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    class ProcessGroupGloo(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any = c10d.default_pg_timeout, **_: Any) -> None:
            options = gloo._Options()
            options._devices = [device_of(os.getpid())]
            options._timeout = timeout
            options._threads = 1  # in the order in which they were asked for
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo


def _on_gloo(create: Any, default_backend: str | None) -> Any:
    """The same group over gloo; options that describe NCCL or a GPU are dropped."""
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
    """Scale the input, then add."""
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


def _waited_for_once(send_or_receive: Any) -> Any:
    @functools.wraps(send_or_receive)
    def start(*args: Any, **kwargs: Any) -> Any:
        work = send_or_receive(*args, **kwargs)
        return None if work is None else _Sent(work)

    return start


def _ending_at_once(coalescing_manager: Any) -> Any:
    """Coalesced collectives have ended when the block ends, as all that runs on a stream has.

    Megatron-FSDP frees buckets while others are on their way, and waits for one handle once for each bucket; a
    reduce-scatter of gloo's writes its result whenever it is waited for, the second time over what has come since.
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
    """Pad every rank's tensor to the largest; the padded gather has ended when it returns."""

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
