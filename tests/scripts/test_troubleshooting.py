"""docs/troubleshooting.md quotes messages as they are printed."""

import argparse
import ast
import inspect
import re

import pytest

from tests.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^#+ `(.*)`$", PAGE, re.MULTILINE)
SOURCES = [inspect.getsource(argparse)] + [
    file.read_text(encoding="utf-8")
    for package in ("patches/megatron_mtp_patches", "megatron_overrides")
    for file in sorted((ROOT / package).rglob("*.py"))
]


def texts(node):
    """The strings of a source, each f-string as one in which \\0 stands for a value."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


PRINTED = [text for source in SOURCES for text in texts(ast.parse(source))]


assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_is_printed(message):
    # The engine is told the name of the variable.
    pieces = re.split(r"\.\.\.|MEGATRON_MTP_PATCHES(?!_)", message)
    parts = [re.escape(piece.strip()) for piece in pieces if piece.strip(" :;,.")]
    assert any(re.search(".*".join(parts), text, re.DOTALL) for text in PRINTED)
    assert parts
