"""The rows of a fused weight that make up each of its matrices, and the weight put together from them.

The rows of a weight [rows, columns] are a sequence of equal groups: heads, for example, or one group that is all of it.
A group consists of pieces, each a number of rows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# The attribute of a parameter, and of its main copy, that has its FusedRows.
FUSED_ROWS = "muon_fused_rows"


class FusedRows(NamedTuple):
    """The rows of a fused weight, or of the part of it that a tensor-parallel rank has.

    Attributes:
        sizes: the rows of each piece of a group.
        is_each_group_alone: the piece of each group is a matrix (a head); otherwise the pieces of all groups together
            are one (the gate of an MLP), with those of the other tensor-parallel ranks.
        in_batches: matrices of one size are orthogonalized in one call, [groups, size, columns].
    """

    sizes: tuple[int, ...]
    is_each_group_alone: bool = False
    in_batches: bool = True

    def divide(self, rows: int) -> bool:
        """True if so many rows are whole groups."""
        return rows % sum(self.sizes) == 0


def halves(rows: int, block: int | None = None) -> FusedRows:
    """Gate and up of `rows`: the first half and the second, or blocks of so many rows by turns."""
    return FusedRows((block or rows // 2,) * 2)


def orthogonalize_pieces(
    matrix: torch.Tensor,
    rows: FusedRows,
    orthogonalize: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Put together the results of `orthogonalize` for every matrix in `matrix`, [rows, columns].

    Args:
        orthogonalize: gets [rows of a piece in all groups, columns]; with is_each_group_alone, [size, columns] of one
            group, or of all of them in a batch, [groups, size, columns].
    """
    columns = matrix.size(1)
    pieces = matrix.view(-1, sum(rows.sizes), columns).split(rows.sizes, dim=1)
    done = []
    for piece in pieces:
        if not rows.is_each_group_alone:
            done.append(orthogonalize(piece.reshape(-1, columns)).view(piece.shape))
        elif rows.in_batches:
            done.append(orthogonalize(piece.contiguous()))
        else:
            done.append(torch.stack([orthogonalize(one) for one in piece]))
    return torch.cat(done, dim=1).view(matrix.shape)
