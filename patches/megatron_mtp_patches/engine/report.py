"""What is told of a patch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Where one patch stands in this process.

    Attributes:
        id: the patch, as in MEGATRON_MTP_PATCHES.
        state: pending, applied, repaired, native, disabled or refused.
        reason: why, in a sentence.
        upstream: the changes that it stands for, as `#number`.
        summary: what it does, in a line.
        targets: {`module:name`: what became of it}.
    """

    id: str
    state: str
    reason: str
    upstream: tuple[str, ...]
    summary: str
    targets: dict[str, str]
