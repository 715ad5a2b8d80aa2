"""One table for the terminal and for Markdown."""

from __future__ import annotations

from typing import NamedTuple

import markdown_pages


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Column
        from rich.table import Table as RichTable

        table = RichTable(*(Column(text, overflow="fold") for text in self.columns), title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        console.width = max(console.width, 150)
        console.print(table)
        if self.note:
            console.print(self.note, markup=False, highlight=False)

    def markdown(self) -> list[str]:
        table = markdown_pages.table(self.columns, self.rows)
        return [f"## {self.title}", "", *table, "", *([self.note, ""] if self.note else [])]
