"""A second import of the package in one process takes the place of the first."""

from __future__ import annotations

import importlib
import sys

import megatron_mtp_patches
import pytest

from tests.conformance.inspection import changes_since, import_targets, in_force, snapshot

pytestmark = pytest.mark.forked("megatron")


def import_package_again(monkeypatch):
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("megatron_mtp_patches", "megatron_overrides")
    ]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("megatron_mtp_patches")


@pytest.mark.parametrize("is_reload", [True, False], ids=["importlib.reload", "purged from sys.modules"])
def test_each_edit_is_in_force_once_and_the_originals_are_known(monkeypatch, is_reload):
    import_targets()
    megatron_mtp_patches.revert()
    originals = snapshot()
    megatron_mtp_patches.apply()
    applied, states = in_force(), {report.id: report.state for report in megatron_mtp_patches.status()}
    again = importlib.reload(megatron_mtp_patches) if is_reload else import_package_again(monkeypatch)
    try:
        assert {report.id: str(report.state) for report in again.status()} == states
        assert in_force() == applied
    finally:
        again.revert()
    assert changes_since(originals) == []
