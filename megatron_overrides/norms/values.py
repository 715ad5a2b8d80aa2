"""The gradient norms of one step, as a value that is handed on from measuring to deciding, publishing and clipping."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from megatron_overrides.norms.groups import Group

# A float or, with TransformerEngine >= 2.14 from Megatron 0.17 on, a one-element CUDA tensor.
GradNorm: TypeAlias = float | torch.Tensor


class Census(NamedTuple):
    """The groups with parameters on any rank, and whether any rank has leaf optimizers that are clipped or exempt."""

    groups: frozenset[Group]
    has_clipped: bool
    has_exempt: bool


class GradNorms(NamedTuple):
    """The norms by group, the main one under None; the same on every rank.

    `total`: of all gradients; `clipping`: of those that are not exempt from clipping. The groups are those that a
    parameter on any rank is tagged with. `census` is None if another library has measured.
    """

    total: dict[Group, GradNorm]
    clipping: dict[Group, GradNorm]
    census: Census | None = None

    @property
    def by_group(self) -> dict[str, GradNorm]:
        """Without the main norm, as upstream's `grad_norms_by_group`."""
        return {group: norm for group, norm in self.total.items() if group is not None}
