"""Patches that are applied before Megatron is imported and wait for its modules, or after it.

That of TransformerEngine does not wait, because a rehearsal has imported it.
"""

from __future__ import annotations

import ast
import functools
import sys
from unittest.mock import NonCallableMock

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.source import find_definition, find_file

from .expected import EXPECTED, IDS, STATE
from .inspection import count, import_targets, in_force, problems, reports

pytestmark = pytest.mark.forked("torch")

OF_TRANSFORMER_ENGINE = {patch.id for patch in CATALOG if patch.package == "transformer-engine"}


@pytest.fixture(scope="module")
def waiting():
    """What is reported of the patches before Megatron is imported."""
    megatron_mtp_patches.apply()
    states = reports()
    assert "megatron.core" not in sys.modules
    return states


@pytest.fixture(scope="module")
def imported(waiting):
    """What is reported of them once it is, and how often each edit is in force."""
    import_targets()
    return reports(), in_force()


@pytest.mark.parametrize("patch", IDS)
def test_a_patch_waits_for_megatron(patch, waiting):
    is_imported = patch in OF_TRANSFORMER_ENGINE and STATE[patch] == "applied"
    assert waiting[patch].state == (EXPECTED[patch] if EXPECTED[patch] == "native" or is_imported else "pending")


@pytest.mark.parametrize("patch", IDS, indirect=True)
def test_applied_exactly_once(patch, imported):
    states, _ = imported
    assert problems(patch, states[patch.id], STATE[patch.id]) == []


@pytest.mark.parametrize("patch", IDS, indirect=True)
def test_a_target_is_missing_only_where_the_source_lacks_it(patch, imported):
    for edit in patch.edits:
        tree = parse_source(edit.module)
        in_source = tree is not None and find_definition(tree, edit.needed_name) is not None
        assert (count(edit) is not None) == (in_source and not is_stand_in(edit)), edit


@functools.cache
def parse_source(module):
    """The syntax tree of a module, or None where it has no source here."""
    file = find_file(module)
    return file and ast.parse(file.read_bytes())


def is_stand_in(edit):
    """Without TransformerEngine, Megatron has None or a mock in place of a class that derives from one of it."""
    names, owner = vars(sys.modules.get(edit.module, sys)), edit.name.partition(".")[0]
    return owner in names and (names[owner] is None or isinstance(names[owner], NonCallableMock))


def test_a_second_call_and_one_after_megatron_is_imported_apply_the_same(imported):
    megatron_mtp_patches.apply()
    assert (reports(), in_force()) == imported
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply()
    assert (reports(), in_force()) == imported
