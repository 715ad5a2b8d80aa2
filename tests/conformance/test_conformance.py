"""Patches that are applied to a Megatron which is imported already."""

from __future__ import annotations

import argparse
import contextlib
import sys
from types import ModuleType

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE
from megatron_mtp_patches.engine.source import find_file

from .expected import IDS
from .inspection import PATCHES, changes_since, count, import_targets, reports, snapshot

pytestmark = pytest.mark.forked("megatron")


@pytest.fixture
def apply():
    """apply(): as megatron_mtp_patches.apply; reverted after the test."""
    yield megatron_mtp_patches.apply
    megatron_mtp_patches.revert()


@pytest.fixture
def user(monkeypatch):
    """A module that has imported by value, from Megatron as it was, each function and class that patches edit."""
    import_targets()
    module = ModuleType("user_of_megatron")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for edit in (edit for patch in PATCHES for edit in patch.edits):
        if edit.name in vars(sys.modules.get(edit.module, module)):
            setattr(module, edit.target, vars(sys.modules[edit.module])[edit.name])
    return module


def stale_names(user):
    """The targets of which the user has something else than Megatron now."""
    targets = [target for target in vars(user) if ":" in target]
    return [target for target in targets if vars(user)[target] is not now_at(target)]


def now_at(target):
    module, _, name = target.partition(":")
    return vars(sys.modules[module])[name]


def test_revert_puts_every_original_back(apply):
    import_targets()
    original = snapshot()
    for _ in range(2):
        apply()
        assert "ChainedOptimizer.step" in changes_since(original)
        megatron_mtp_patches.revert()
        assert changes_since(original) == []
        assert {report.state for report in reports().values()} == {"disabled"}


def test_names_that_were_imported_by_value_are_rebound(apply, user):
    """A function that another library imported, replaced or wrapped, is the new one to it; it keeps its classes."""
    taken = dict(vars(user))
    apply()
    assert stale_names(user) == []
    followed = [target for target, value in vars(user).items() if value is not taken[target]]
    assert "megatron.core.optimizer.qk_clip:clip_qk" in followed
    assert not [target for target in followed if isinstance(taken[target], type)]
    megatron_mtp_patches.revert()
    assert vars(user) == taken
    assert stale_names(user) == []


def test_none_leaves_megatron_untouched_except_for_the_check_of_the_ranks(apply, monkeypatch):
    import_targets()
    original = snapshot()
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "none")
    apply()
    assert {report.state for report in reports().values()} == {"disabled"}
    base = [edit for patch in BASE for edit in patch.edits if find_file(edit.module)]
    assert base and [count(edit) for edit in base] == [1] * len(base)
    changed = {name.rpartition(".")[2] for name in changes_since(original)}
    assert changed == {edit.name.rpartition(".")[2] for edit in base}


def test_the_record_is_in_megatron_s_arguments(apply):
    arguments = pytest.importorskip("megatron.training.arguments", reason="the wheel of this release has no trainer")
    apply()
    for call in (lambda args: arguments.validate_args(args), lambda args: arguments.validate_args(args=args)):
        args = argparse.Namespace()
        with contextlib.suppress(AttributeError):  # Megatron's own body misses the other arguments
            call(args)
        assert args.megatron_mtp_patches == megatron_mtp_patches.record()
        assert all(f"{patch}=" in args.megatron_mtp_patches for patch in IDS)
