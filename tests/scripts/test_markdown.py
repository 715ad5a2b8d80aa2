"""scripts/common/markdown.py: what the terminal shows, as Markdown."""

import pytest

from scripts.common.markdown import Table, fill, table

pytestmark = pytest.mark.forked("python")


def test_a_table_for_the_terminal_and_for_a_page(capsys):
    shown = Table(
        "in bits", ["", "two\nlines"], [["a | b < c", "1"], ["bad", "2"]], right=(1,), bad=(1,), note="why [x]"
    )
    assert shown.lines() == ["| in bits | two lines |", "|---|---:|", "| a \\| b &lt; c | 1 |", "| bad | 2 |"]
    assert shown.section() == ["## in bits", "", *shown.lines(), "", "why [x]", ""]
    shown.show()
    printed = capsys.readouterr().out
    assert "in bits" in printed and "a | b < c" in printed and printed.endswith("why [x]\n")


def test_code_is_shown_as_it_is():
    assert table(["`a < b`"], []) == ["| `a < b` |", "|---|"]


def test_a_block_is_filled_and_the_others_stay():
    page = "<!-- made by x: a -->\nold\n<!-- end -->\n<!-- made by y --doc: b -->\nkept\n<!-- end -->\n"
    assert fill(page, {"a": "new"}) == page.replace("old", "new")
