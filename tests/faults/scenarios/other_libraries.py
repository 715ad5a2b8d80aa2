"""Another library has patched the same method before these patches, or does so after them."""

from __future__ import annotations

import functools
import warnings

import megatron_mtp_patches
import wrapt
from inspect_patches import declared, differences, snapshot
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import PatchError

TARGET = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"


def assign(owner, name):
    """As verl and ms-swift do."""

    def theirs(self, *args, **kwargs):
        return "theirs"

    setattr(owner, name, theirs)


def wrap(owner, name):
    original = vars(owner)[name]

    @functools.wraps(original)
    def theirs(self, *args, **kwargs):
        self.seen_by_them = True
        return original(self, *args, **kwargs)

    setattr(owner, name, theirs)


def wrap_with_wrapt(owner, name):
    def theirs(wrapped, instance, args, kwargs):
        instance.seen_by_them = True
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(owner, name, theirs)


WAYS = (assign, wrap, wrap_with_wrapt)


def look() -> dict:
    return {way.__name__: {"before": before(way), "after": after(way), "around": around(way)} for way in WAYS}


def apply_and_tell(policy: str) -> str:
    try:
        megatron_mtp_patches.apply("all", policy)
    except PatchError as error:
        return str(error)
    return ""


def before(way) -> dict:
    """Theirs is where a Replace belongs."""
    original = vars(ChainedOptimizer)["step"]
    way(ChainedOptimizer, "step")
    theirs = vars(ChainedOptimizer)["step"]
    start = snapshot(declared())
    error = apply_and_tell("raise")
    left = differences(start, snapshot(declared()))
    apply_and_tell("skip")
    states = {report.id: report.state for report in megatron_mtp_patches.status()}
    kept = vars(ChainedOptimizer)["step"] is theirs
    megatron_mtp_patches.revert()
    left += differences(start, snapshot(declared()))
    ChainedOptimizer.step = original
    users = [patch.id for patch in declared() if any(edit.target == TARGET for edit in patch.edits)]
    return {"error": error, "left": left, "kept": kept, "states": states, "users": users}


def after(way) -> dict:
    """Theirs lies over ours."""
    start = snapshot(declared())
    megatron_mtp_patches.apply()
    ours = vars(ChainedOptimizer)["step"]
    way(ChainedOptimizer, "step")
    covered = snapshot(declared())
    told = {report.targets.get(TARGET) for report in megatron_mtp_patches.status()} - {None, "untouched"}
    errors = []
    for attempt in (megatron_mtp_patches.revert, megatron_mtp_patches.apply):
        try:
            attempt()
        except PatchError as error:
            errors.append(str(error))
    moved = differences(covered, snapshot(declared()))
    ChainedOptimizer.step = ours
    megatron_mtp_patches.revert()
    return {"told": sorted(told), "errors": errors, "moved": moved, "left": differences(start, snapshot(declared()))}


def around(way) -> dict:
    """Theirs lies under a wrapper of ours that leans on no source: both run."""
    original = TransformerConfig.__post_init__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        way(TransformerConfig, "__post_init__")
        theirs = vars(TransformerConfig)["__post_init__"]
        megatron_mtp_patches.apply()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_detach_heads=False)
        try:
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_acceptance_interval=-1)
            checked = False
        except (ValueError, AssertionError):
            checked = True
        megatron_mtp_patches.revert()
    kept = vars(TransformerConfig)["__post_init__"] is theirs
    TransformerConfig.__post_init__ = original
    return {"theirs ran": way is assign or config.seen_by_them, "ours ran": checked, "kept": kept}
