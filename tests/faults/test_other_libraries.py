"""Another library that patches the same method, as verl, ms-swift and Liger do, is neither overrun nor undone."""

from __future__ import annotations

import warnings

import megatron_mtp_patches
import pytest
import wrapt
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import PatchError
from megatron_mtp_patches.catalog import CATALOG

from tests.conformance.expected import STATE
from tests.conformance.inspection import changes_since, problems, reports, snapshot

pytestmark = pytest.mark.forked("megatron")

TARGET = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
USERS = [patch for patch in CATALOG if any(edit.target == TARGET for edit in patch.edits)]


def assign(owner, name):
    """As verl and ms-swift do."""

    def theirs(self, *args, **kwargs):
        self.seen_by_them = True

    setattr(owner, name, theirs)


def wrap_with_wrapt(owner, name):
    def theirs(wrapped, instance, args, kwargs):
        instance.seen_by_them = True
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(owner, name, theirs)


IN_EACH_WAY = pytest.mark.parametrize("patch_like_them", [assign, wrap_with_wrapt])


@pytest.fixture(autouse=True)
def megatron_as_it_was():
    """Each test begins with an unpatched Megatron and leaves one."""
    before = snapshot()
    methods = [(ChainedOptimizer, "step"), (TransformerConfig, "__post_init__")]
    originals = [vars(owner)[name] for owner, name in methods]
    yield
    megatron_mtp_patches.revert()
    for (owner, name), original in zip(methods, originals, strict=True):
        setattr(owner, name, original)
    assert changes_since(before) == []


@IN_EACH_WAY
def test_patches_that_do_not_need_that_method_apply(patch_like_them):
    patch_like_them(ChainedOptimizer, "step")
    theirs = vars(ChainedOptimizer)["step"]
    megatron_mtp_patches.apply(on_drift="skip")
    assert vars(ChainedOptimizer)["step"] is theirs
    states = reports()
    reasons = [states[patch.id].reason for patch in USERS]
    assert reasons and all(f"{TARGET} was already changed by {__name__} (" in reason for reason in reasons)
    for patch in CATALOG:
        if patch not in USERS:
            assert problems(patch, states[patch.id], STATE[patch.id]) == []
    megatron_mtp_patches.revert()
    assert vars(ChainedOptimizer)["step"] is theirs


@IN_EACH_WAY
def test_neither_revert_nor_apply_changes_anything_when_another_library_patched_after_us(patch_like_them):
    megatron_mtp_patches.apply()
    ours = vars(ChainedOptimizer)["step"]
    patch_like_them(ChainedOptimizer, "step")
    covered = snapshot()
    for patch, report in reports().items():
        if TARGET in report.targets and STATE[patch] != "native":
            assert report.targets[TARGET].startswith("applied, then changed by ")
    for attempt in (megatron_mtp_patches.revert, megatron_mtp_patches.apply):
        with pytest.raises(PatchError, match=f"{TARGET} was changed by .*; undo that first"):
            attempt()
    assert changes_since(covered) == []
    ChainedOptimizer.step = ours


@IN_EACH_WAY
def test_a_wrapper_that_does_not_depend_on_the_source_goes_around_theirs(patch_like_them):
    patch_like_them(TransformerConfig, "__post_init__")
    theirs = vars(TransformerConfig)["__post_init__"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron_mtp_patches.apply()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_detach_heads=False)
        assert config.seen_by_them
        with pytest.raises((ValueError, AssertionError), match="mtp-acceptance-interval"):
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_acceptance_interval=-1)
    megatron_mtp_patches.revert()
    assert vars(TransformerConfig)["__post_init__"] is theirs
