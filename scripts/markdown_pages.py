"""Markdown that scripts write: tables, and the generated blocks of a page.

A block stands between `<!-- made by COMMAND: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from rich.table import Table
from rich.text import Text

BLOCK = re.compile(r"(<!-- made by [^:>]+: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def row(*cells: object) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def table(header: Collection[object], rows: Iterable[Iterable[object]], right: Collection[int] = ()) -> list[str]:
    """Its lines; `right` are the columns that are flush right."""
    sides = ("---:" if number in right else "---" for number in range(len(header)))
    return [row(*header), "|" + "|".join(sides) + "|", *(row(*cells) for cells in rows)]


def from_rich(shown: Table) -> list[str]:
    """The table that the terminal shows; its title heads the first column where that has no header."""
    header = [_plain(column.header) for column in shown.columns]
    header[0] = header[0] or _plain(shown.title)
    right = [number for number, column in enumerate(shown.columns) if column.justify == "right"]
    cells = ([_plain(cell) for cell in column.cells] for column in shown.columns)
    return table(header, zip(*cells, strict=True), right)


def fill(text: str, contents: Mapping[str, str]) -> str:
    """`text` with each block that `contents` has; the others stay as they are."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{contents.get(match['name'], match['text']).strip()}\n{match[4]}"

    return BLOCK.sub(block, text)


def _escape(cell: object) -> str:
    text = str(cell).replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;")  # code shows what it is given


def _plain(cell: object) -> str:
    return " ".join(Text.from_markup(str(cell)).plain.split())
