"""Count what a step makes the host and the network do: all-reduces, host-device syncs, kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# Reading one number of a tensor on the host. On a GPU it ends in the first of WAITS.
READ = "aten::_local_scalar_dense"
# torch's optimizers count their steps in tensors on the host: reading those waits for nothing.
TORCH_OPTIMIZER_STEP = "Optimizer.step#"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


class Counts(NamedTuple):
    """Counts of one step. On a CPU nothing is launched, and a sync is a number that a GPU's host waits for."""

    all_reduces: float
    host_syncs: float
    launches: float | None


def count(step: Callable[[], Any], steps: int, on_gpu: bool) -> Counts:
    """Return the mean of `steps` calls of `step`, which has already run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with (
        _calls(torch.distributed, "all_reduce") as reduced,
        _calls(torch.Tensor, "tolist") as listed,
        torch.profiler.profile(activities=activities) as profile,
    ):
        for _ in range(steps):
            step()
    if on_gpu:
        waits, launches = tally(event.name() for event in profile.profiler.kineto_results.events())
        return Counts(len(reduced) / steps, waits / steps, launches / steps)
    waits = len(listed)  # several numbers read at once, which no event shows
    waits += sum(event.name == READ and not _belongs_to_step_count(event) for event in profile.events())
    return Counts(len(reduced) / steps, waits / steps, None)


def tally(names: Iterable[str]) -> tuple[int, int]:
    """Return (syncs, launches) among the names of the events on a GPU."""
    waits = launches = 0
    for name in names:
        waits += name in WAITS
        launches += name.startswith(LAUNCHES)
    return waits, launches


def _belongs_to_step_count(event: Any) -> bool:
    while event is not None and not event.name.startswith(TORCH_OPTIMIZER_STEP):
        event = event.cpu_parent
    return event is not None


@contextmanager
def _calls(owner: Any, name: str) -> Iterator[list[None]]:
    """Collect one entry for each call of owner.name."""
    original = getattr(owner, name)
    calls: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        setattr(owner, name, original)
