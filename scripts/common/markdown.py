"""Tables for the terminal and for Markdown, and the generated blocks of a page.

A block stands between `<!-- made by COMMAND: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

BLOCK = re.compile(r"(<!-- made by [^:>]+: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


class Table(NamedTuple):
    """The cells of a table.

    Attributes:
        right: the columns that are flush right.
        bad: the rows that the terminal shows in red.
        note: what is said below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    right: Collection[int] = ()
    bad: Collection[int] = ()
    note: str = ""

    def show(self) -> None:
        """Print it."""
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number in self.right else "left", overflow="fold")
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="red" if number in self.bad else None)
        console = Console()
        console.width = max(console.width, 150)
        console.print(table)
        if self.note:
            console.print(self.note, markup=False, highlight=False)

    def lines(self) -> list[str]:
        """The Markdown; the title heads the first column where that has no header."""
        first, *others = (" ".join(column.split()) for column in self.columns)
        return table([first or self.title, *others], self.rows, self.right)

    def section(self) -> list[str]:
        """The Markdown, below its title."""
        return [f"## {self.title}", "", *self.lines(), "", *([self.note, ""] if self.note else [])]


def table(header: Collection[object], rows: Iterable[Iterable[object]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table; the columns `right` are flush right."""
    sides = ("---:" if number in right else "---" for number in range(len(header)))
    return [_row(header), "|" + "|".join(sides) + "|", *map(_row, rows)]


def fill(text: str, contents: Mapping[str, str]) -> str:
    """`text` with each block that `contents` has; the others stay as they are."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{contents.get(match['name'], match['text']).strip()}\n{match[4]}"

    return BLOCK.sub(block, text)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(cell: object) -> str:
    text = str(cell).replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")  # code shows what it is given
