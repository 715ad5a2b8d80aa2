"""The state of each patch, and of its targets, while the patches are applied."""

from __future__ import annotations

import ast
import functools
import sys
from unittest.mock import NonCallableMock

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.engine.source import find_definition, find_file

from .expected import IDS, STATE
from .inspection import count, problems, reports

pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.parametrize("patch", IDS, indirect=True),
    pytest.mark.parametrize("reverted_before", [False, True], ids=["first", "after a revert"], scope="module"),
]


@functools.cache
def parse_source(module):
    """The syntax tree of a module, or None where it has no source here."""
    file = find_file(module)
    return file and ast.parse(file.read_bytes())


@pytest.fixture(scope="module")
def reported(reverted_before):
    """What is reported of the patches, while they are applied."""
    megatron_mtp_patches.apply()
    if reverted_before:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply()
    yield reports()
    megatron_mtp_patches.revert()


def test_applied_exactly_once(patch, reported):
    assert problems(patch, reported[patch.id], STATE[patch.id]) == []


def test_a_target_is_missing_only_where_the_source_lacks_it(patch, reported):
    for edit in patch.edits:
        tree = parse_source(edit.module)
        in_source = tree is not None and find_definition(tree, edit.needed_name) is not None
        assert (count(edit) is not None) == (in_source and not is_stand_in(edit)), edit


def is_stand_in(edit):
    """Without TransformerEngine, Megatron has None or a mock in place of a class that derives from one of it."""
    names, owner = vars(sys.modules.get(edit.module, sys)), edit.name.partition(".")[0]
    return owner in names and (names[owner] is None or isinstance(names[owner], NonCallableMock))
