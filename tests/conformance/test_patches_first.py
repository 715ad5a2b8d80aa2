"""Patches that are applied before Megatron is imported, and wait for its modules.

That of TransformerEngine does not wait, because a rehearsal has imported it.
"""

from __future__ import annotations

import sys

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG

from .expected import EXPECTED, IDS, STATE
from .inspection import import_targets, in_force, problems, reports

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


@pytest.fixture(scope="module")
def applied_again(imported):
    """The same after a second `apply()`, without a revert."""
    megatron_mtp_patches.apply()
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
def test_applied_exactly_once_by_two_calls(patch, applied_again):
    states, _ = applied_again
    assert problems(patch, states[patch.id], STATE[patch.id]) == []


def test_two_calls_apply_what_one_applies(imported, applied_again):
    assert applied_again == imported


def test_the_result_is_the_same_where_megatron_is_imported_first(imported):
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply()
    assert (reports(), in_force()) == imported
