"""What was found, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.common.markdown import Table
from scripts.losses.conditions import DEPTHS, LAYOUTS, RANKS, conditions

TITLE = "Losses of MTP heads, compared with float64 autograd on full logits"
LOSS, GRADIENT = 1e-6, 1e-5  # how far float32 may be from the reference


def make_table(kept: list[dict[str, Any]]) -> Table:
    """A row for each condition, and for each release the differences of loss and gradient, in float32 and bfloat16."""
    columns = ["condition"]
    for one in kept:
        columns += [f"{one['versions']['megatron-core']}: loss", "gradient", "bf16: loss", "gradient"]
    rows = []
    for layout in LAYOUTS:
        for pair in zip(conditions(layout), conditions(layout, "bfloat16"), strict=True):
            differences = (one["found"][str(condition)] for one in kept for condition in pair)
            name = str(pair[0]).removesuffix(f", {pair[0].dtype}")
            rows.append([name, *(f"{number:.1e}" for numbers in differences for number in numbers)])
    torch = sorted({one["versions"]["torch"].partition("+")[0] for one in kept})
    note = (
        "Norm of the difference over norm of the reference; the gradient is that of all hidden states of the heads and "
        f"of the output weight, on the rank where it is farthest off. {DEPTHS} heads, depth weights 1, 0.5 and 2, a "
        f"padded vocabulary, scaled logits, chunks of 9 rows. float32 may be off by {LOSS} and {GRADIENT}. {RANKS} "
        f"ranks of a rehearsal; torch {', '.join(torch)}."
    )
    return Table(TITLE, columns, rows, note=note)


def too_far(found: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The conditions in float32 that are farther from the reference, in loss or gradient, than they may be."""
    for condition, (loss, gradient) in found.items():
        if condition.endswith("float32") and (loss > LOSS or gradient > GRADIENT):
            yield condition
