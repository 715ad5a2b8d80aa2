"""Say of some forward passes whether the MTP heads do any work in them: `megatron_mtp_patches.mtp_pass`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from megatron_overrides.mtp.metrics.head_metrics import PassMetrics


class Request(NamedTuple):
    """What the caller of some forward passes wants of the heads; see `megatron_mtp_patches.mtp_pass`."""

    compute: bool
    metrics: PassMetrics
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None


_requested: ContextVar[Request | None] = ContextVar("what is wanted of the MTP heads", default=None)


def requested() -> Request | None:
    """Return what the caller wants, or None if it has said nothing."""
    return _requested.get()


@contextmanager
def mtp_pass(
    compute: bool, labels: torch.Tensor | None = None, loss_mask: torch.Tensor | None = None
) -> Iterator[PassMetrics]:
    """Run the heads and their losses in the forward passes inside, or do not.

    See `megatron_mtp_patches.mtp_pass`.
    """
    metrics = PassMetrics()
    token = _requested.set(Request(compute, metrics, labels, loss_mask))
    try:
        yield metrics
    finally:
        _requested.reset(token)
