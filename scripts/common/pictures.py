"""The look of all pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image  # matplotlib needs it, too

RED, YELLOW, BLUE, GREEN, GREY, DARK = "#c8452f", "#c99700", "#1f6fb2", "#3c8d5a", "#8a8a8a", "#444444"


def start(title: str, titles: list[str], rows: int, size: tuple[float, float], **shape: Any) -> tuple[Any, list[Any]]:
    """A figure, and its plots with these titles, in this many rows."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, grid = plt.subplots(
        rows, len(titles) // rows, figsize=size, layout="constrained", sharex="col", squeeze=False, **shape
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=15, weight="bold")
    plots = list(grid.flat)
    for axes, text in zip(plots, titles, strict=True):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(text, loc="left", fontsize=10.5)
    return figure, plots


def save(figure: Any, file: Path) -> None:
    """Write a PNG of 64 colours, which takes a third of the bytes."""
    figure.savefig(file, dpi=130)
    plt.close(figure)
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
