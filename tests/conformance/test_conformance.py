"""Patches that are applied to a Megatron which is imported already."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from types import ModuleType

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE
from megatron_mtp_patches.engine.source import find_file

from .expected import IDS
from .inspection import (
    changes_since,
    count,
    hold,
    import_targets,
    names_changed_since,
    reports,
    snapshot,
)

pytestmark = pytest.mark.forked("megatron")

# What Megatron-Bridge, mcore-bridge, ms-swift and verl take by value of what the patches touch, and when.
BY_VALUE = {
    "megatron.core": ["DistributedDataParallel", "ModelParallelConfig"],
    "megatron.core.distributed": ["DistributedDataParallel"],
    "megatron.core.models.common.language_module.language_module": ["LanguageModule"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.models.gpt.gpt_model": ["GPTModel"],
    "megatron.core.optimizer": [
        "ChainedOptimizer",
        "DistributedOptimizer",
        "OptimizerConfig",
        "get_megatron_optimizer",
    ],
    "megatron.core.optimizer.layer_wise_optimizer": ["LayerWiseDistributedOptimizer"],
    "megatron.core.optimizer.optimizer": ["ChainedOptimizer"],
    "megatron.core.optimizer.qk_clip": ["clip_qk"],
    "megatron.core.transformer": ["TransformerConfig"],
    "megatron.core.transformer.multi_token_prediction": [
        "MTPLossLoggingHelper",
        "MultiTokenPredictionBlock",
        "MultiTokenPredictionLayer",
        "_compute_mtp_acceptance_counts",
        "process_mtp_loss",
        "roll_tensor",
    ],
    "megatron.training.arguments": ["validate_args", "add_megatron_arguments"],
}


@pytest.fixture
def apply():
    """apply(): as megatron_mtp_patches.apply; reverted after the test."""
    yield megatron_mtp_patches.apply
    megatron_mtp_patches.revert()


@pytest.fixture
def user(monkeypatch):
    """A module that did `from megatron... import ...`, before anything is applied."""
    module = ModuleType("user_of_megatron")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for source, names in BY_VALUE.items():
        with contextlib.suppress(ModuleNotFoundError):
            loaded = vars(importlib.import_module(source))
            vars(module).update({name: loaded[name] for name in names if name in loaded})
    return module


def stale_names(user):
    """The names of the user's that are not what Megatron has under that name now."""
    return [
        name
        for module, names in BY_VALUE.items()
        for name in names
        if hasattr(user, name) and vars(user)[name] is not vars(sys.modules[module])[name]
    ]


def test_revert_puts_every_original_back(apply):
    modules = import_targets()
    original, contents = snapshot(), hold(modules)
    for _ in range(2):
        apply()
        assert "ChainedOptimizer.step" in changes_since(original)
        megatron_mtp_patches.revert()
        assert changes_since(original) == names_changed_since(contents, modules) == []
        assert {report.state for report in reports().values()} == {"disabled"}


def test_names_that_were_imported_by_value_are_rebound(apply, user):
    """A function that another library imported, replaced or wrapped, is the new one to it; it keeps its classes."""
    taken = dict(vars(user))
    apply()
    assert stale_names(user) == []
    followed = {name for name, value in vars(user).items() if value is not taken[name]}
    assert {"clip_qk", "roll_tensor"} <= followed
    assert [name for name in followed if name[0].isupper()] == []
    megatron_mtp_patches.revert()
    assert stale_names(user) == []
    assert vars(user) == taken


def test_none_leaves_megatron_untouched_except_for_the_check_of_the_ranks(apply, monkeypatch):
    modules = import_targets()
    contents = hold(modules)
    monkeypatch.setenv("MEGATRON_MTP_PATCHES", "none")
    apply()
    assert {report.state for report in reports().values()} == {"disabled"}
    base = [edit for patch in BASE for edit in patch.edits if find_file(edit.module)]
    assert base and [count(edit) for edit in base] == [1] * len(base)
    changed = {name.rpartition(":")[2] for name in names_changed_since(contents, modules)}
    assert changed == {edit.name for edit in base}
    megatron_mtp_patches.revert()
    assert names_changed_since(contents, modules) == []


def test_the_record_is_in_megatron_s_arguments(apply):
    arguments = pytest.importorskip("megatron.training.arguments", reason="the wheel of this release has no trainer")
    apply()
    for call in (lambda args: arguments.validate_args(args), lambda args: arguments.validate_args(args=args)):
        args = argparse.Namespace()
        with contextlib.suppress(AttributeError):  # Megatron's own body misses the other arguments
            call(args)
        assert args.megatron_mtp_patches == megatron_mtp_patches.record()
        assert all(f"{patch}=" in args.megatron_mtp_patches for patch in IDS)
