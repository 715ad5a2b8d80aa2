"""Decide for some forward passes whether the MTP heads run: `megatron_mtp_patches.mtp_pass`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_overrides.mtp.forward_pass import Request, mtp_pass_request
from megatron_overrides.mtp.metrics.head_metrics import PassMetrics
from megatron_overrides.scoped import scoped


@contextmanager
def mtp_pass(
    compute: bool, labels: torch.Tensor | None = None, loss_mask: torch.Tensor | None = None
) -> Iterator[PassMetrics]:
    """Run the heads and their losses in the forward passes inside, or do not.

    See `megatron_mtp_patches.mtp_pass`.
    """
    metrics = PassMetrics()
    with scoped(mtp_pass_request, Request(compute, metrics, labels, loss_mask)):
        yield metrics
