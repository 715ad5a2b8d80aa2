"""Where the commands print."""

from __future__ import annotations

import os

from rich.console import Console

PIPE = 170  # columns: the longest target and the releases that share its source


def make_console() -> Console:
    """As wide as the terminal; into a pipe or a file so wide that names stay whole."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE
    return console
