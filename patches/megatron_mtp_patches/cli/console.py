"""The consoles that the commands print to."""

from __future__ import annotations

import os
from collections.abc import Callable

from rich.console import Console

PIPE = 170  # columns: the longest target and the releases that share its source


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # for main(), which ends every command alike; rich would end it with 1


def make_console() -> Console:
    """As wide as the terminal; into a pipe or a file so wide that names stay whole."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE
    return console


def make_printer() -> Callable[..., None]:
    """Return `show(text, style=None)`, which prints text as it is: rich neither wraps it nor reads markup in it."""
    console = make_console()

    def show(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    return show
