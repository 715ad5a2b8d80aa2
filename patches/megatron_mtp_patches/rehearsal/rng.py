"""Layer 4: two random streams, although the CPU has one.

Megatron draws from a CUDA and a CPU generator and checks that work with one does not change the other ('CPU RNG state
changed within GPU RNG context'). On a CPU every kernel draws from torch's default generator, so that one stands for the
GPU's. The Python API of the CPU generator, and the data loader's base seed, use a second generator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import dataloader

from .dispatcher import CPU, cpu_for_cuda

_gpu = torch.default_generator
_cpu = torch.Generator()


class Generator(torch._C.Generator):
    """A torch.Generator that accepts a CUDA device."""

    def __new__(cls, device: Any = CPU) -> Generator:
        return super().__new__(cls, device=cpu_for_cuda(device))


def install() -> None:
    """Give the APIs of the CPU and the GPU one generator each."""
    _cpu.set_state(_gpu.get_state())
    torch.Generator = Generator
    for name, function in _cpu_api().items():
        for owner in (torch, torch.random):
            setattr(owner, name, function)
    for name, function in _gpu_api().items():
        for owner in (torch.cuda, torch.cuda.random):
            setattr(owner, name, function)
    torch.cuda.default_generators = (_gpu,) * torch.cuda.device_count()
    _draw_base_seed_on_the_cpu()


def _cpu_api() -> dict[str, Any]:
    def manual_seed(seed: int) -> torch._C.Generator:
        _gpu.manual_seed(int(seed))  # torch.manual_seed seeds every device
        return _cpu.manual_seed(int(seed))

    return {
        "get_rng_state": _cpu.get_state,
        "set_rng_state": lambda new_state: _discard(_cpu.set_state(new_state)),
        "manual_seed": manual_seed,
        "seed": lambda: manual_seed(_cpu.seed()).initial_seed(),
        "initial_seed": _cpu.initial_seed,
    }


def _gpu_api() -> dict[str, Any]:
    def seed(value: int) -> None:
        _gpu.manual_seed(int(value))

    return {
        "get_rng_state": lambda device="cuda": _gpu.get_state(),
        "set_rng_state": lambda new_state, device="cuda": _discard(_gpu.set_state(new_state)),
        "get_rng_state_all": lambda: [_gpu.get_state()],
        "set_rng_state_all": lambda new_states: _discard(_gpu.set_state(new_states[0])),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "initial_seed": _gpu.initial_seed,
    }


def _discard(result: Any) -> None:
    """Return None, as the setters of the torch API do; those of a generator return the generator."""


def _draw_base_seed_on_the_cpu() -> None:
    start = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(start)
    def start_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        with _drawing_on_the_cpu():
            start(self, *args, **kwargs)

    dataloader._BaseDataLoaderIter.__init__ = start_on_cpu


@contextlib.contextmanager
def _drawing_on_the_cpu() -> Iterator[None]:
    gpu_state = _gpu.get_state()
    _gpu.set_state(_cpu.get_state())
    try:
        yield
    finally:
        _cpu.set_state(_gpu.get_state())
        _gpu.set_state(gpu_state)
