"""scripts/markdown_pages.py: what the terminal shows, as Markdown."""

import sys
from pathlib import Path

import pytest
from rich.table import Table


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    yield __import__("markdown_pages")
    del sys.modules["markdown_pages"]


def test_a_table_of_the_terminal(pages):
    table = Table("", title="in bits")
    table.add_column("two\nlines", justify="right")
    table.add_row("[red]a | b < c[/]", "1")
    assert pages.from_rich(table) == ["| in bits | two lines |", "|---|---:|", "| a \\| b &lt; c | 1 |"]


def test_code_is_shown_as_it_is(pages):
    assert pages.row("`a < b`") == "| `a < b` |"


def test_a_block_is_filled_and_the_others_stay(pages):
    page = "<!-- made by x: a -->\nold\n<!-- end -->\n<!-- made by y --doc: b -->\nkept\n<!-- end -->\n"
    assert pages.fill(page, {"a": "new"}) == page.replace("old", "new")
