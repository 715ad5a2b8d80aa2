"""The small runs of flags that stand in a list."""

from __future__ import annotations

import shlex

from megatron_mtp_patches.parity.samples import UNEVEN, WHOLE
from megatron_mtp_patches.parity.small import SmallRun, shrink


def make_small_run(flags: str) -> tuple[SmallRun, str]:
    """A run that is small in bf16, and whose masks are uneven, where the flags say so; and the kind of its samples."""
    words = shlex.split(flags)
    small = shrink(words, "bf16" if "--bf16" in words else "fp32")
    return small, UNEVEN if "--eod-mask-loss" in words else WHOLE
