"""Layer 3: torch.cuda's management API, as one imaginary device per local rank.

Streams run in program order, events record wall-clock time, and memory figures are 0. Whatever has no meaning on a CPU
(CUDA graphs, memory pools) raises a NotImplementedError that names it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from ..engine.import_hook import when_imported

_NOT_ON_A_CPU = (
    "CUDAGraph", "graph", "graph_pool_handle", "MemPool", "use_mem_pool", "ExternalStream",
    "memory._record_memory_history", "memory._dump_snapshot",
)  # fmt: skip
_ZERO_FIGURES = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "device_memory_used", "utilization", "temperature", "power_draw", "clock_rate",
)  # fmt: skip
_NO_OPS = (
    "synchronize", "empty_cache", "reset_peak_memory_stats", "check_error", "_sleep",
    "nvtx.range_push", "nvtx.range_pop", "profiler.start", "profiler.stop",
)  # fmt: skip
_TOTAL_MEMORY = 8 << 30
_current = threading.local()
_device_index = 0


class Stream:
    """A stream of a device on which every operation has finished when its call returns."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _device_index)
        self.priority = priority

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1


class Event:
    """A point in wall-clock time: Megatron's timers subtract two of them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._seconds - self._seconds) * 1e3


class _StreamContext:
    """`with torch.cuda.stream(s)`: it changes current_stream() and nothing else."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = _current_stream()
        _set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        _set_stream(self._outer)


class _Device(contextlib.nullcontext[None]):
    """`with torch.cuda.device(i)`: it does nothing, because there is one device."""


class _Figures(dict[str, int]):
    """memory_stats(): every figure is 0."""

    def __missing__(self, key: str) -> int:
        return 0


class _Runtime:
    """cudart(): each call succeeds and does nothing. --profile starts and stops the profiler through it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


_DEFAULT_STREAM = Stream()
_PROPERTIES = SimpleNamespace(
    name="rehearsal (CPU)", major=8, minor=0, total_memory=_TOTAL_MEMORY, multi_processor_count=1
)


def install() -> None:
    """Replace the functions of torch.cuda, and their copies in its submodules."""
    for name in _NOT_ON_A_CPU:
        _replace(name, _refusing(name))
    for name in _ZERO_FIGURES:
        _replace(name, lambda *args, **kwargs: 0)
    for name in _NO_OPS:
        _replace(name, lambda *args, **kwargs: None)
    for name, value in _cuda_functions().items():
        _replace(name, value)
    # torch.accelerator says there is none: otherwise the DataLoader pins memory and libraries choose GPU kernels.
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None
    when_imported(["torch.distributed.fsdp._fully_shard._fully_shard"], _keep_shards_on_the_cpu)


def _keep_shards_on_the_cpu(fully_shard: Any) -> None:
    """FSDP2 compares the device of parameters with that of the mesh, which Megatron calls cuda."""
    fully_shard._get_device_from_mesh = lambda mesh: torch.device("cpu")


def _cuda_functions() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": _device_count,
        "current_device": lambda: _device_index,  # an int, as torch.device('cuda', current_device()) wants
        "set_device": _set_device,
        "device": _Device,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "mem_get_info": lambda device=None: (_TOTAL_MEMORY, _TOTAL_MEMORY),
        "memory_stats": lambda device=None: _Figures(),
        "memory_snapshot": lambda *args, **kwargs: [],
        "Stream": Stream,
        "Event": Event,
        "stream": _StreamContext,
        "current_stream": lambda device=None: _current_stream(),
        "default_stream": lambda device=None: _DEFAULT_STREAM,
        "set_stream": _set_stream,
        "cudart": _Runtime,
        "nvtx.range": lambda *args, **kwargs: contextlib.nullcontext(),
        "nccl.version": lambda: (0, 0, 0),
    }


def _replace(name: str, value: Any) -> None:
    """Set torch.cuda.<name>, and the same name in the submodule that defines it."""
    cuda = torch.cuda
    module, _, leaf = name.rpartition(".")
    owners = (getattr(cuda, module),) if module else (cuda, cuda.memory, cuda.streams, cuda.graphs)
    for owner in owners:
        if hasattr(owner, leaf):
            setattr(owner, leaf, value)


def _refusing(name: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"torch.cuda.{name}: a rehearsal on the CPU cannot do this.")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _set_device(device: int | str | torch.device) -> None:
    global _device_index
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _device_index = index


def _current_stream() -> Stream:
    return getattr(_current, "stream", _DEFAULT_STREAM)


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current.stream = stream
