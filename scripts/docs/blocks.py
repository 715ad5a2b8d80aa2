"""The generated blocks of a Markdown file: between `<!-- made by scripts/docs.py: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

BLOCK = re.compile(r"(<!-- made by scripts/docs\.py: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def names(text: str) -> list[str]:
    return [match["name"] for match in BLOCK.finditer(text)]


def fill(text: str, contents: Mapping[str, str]) -> str:
    """`text` with each block that `contents` has; the others stay as they are."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{contents.get(match['name'], match['text'].strip()).strip()}\n{match[4]}"

    return BLOCK.sub(block, text)


def markdown(table: Table) -> str:
    """A rich table, its title as the first column's header where that has none."""
    header = [_plain(column.header) for column in table.columns]
    header[0] = header[0] or _plain(table.title or "")
    sides = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [header, sides, *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(cell: object) -> str:
    return " ".join(Text.from_markup(str(cell)).plain.split())
