"""Every edit of every patch fails once: before it has changed anything, and after it has."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import megatron_mtp_patches
from inspect_patches import count, declared, differences, find_owner, snapshot
from megatron_mtp_patches import _engine
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag
from megatron_mtp_patches.engine import installer as engine
from megatron_mtp_patches.engine.fields import Fields
from megatron_mtp_patches.engine.fingerprints import has_place
from megatron_mtp_patches.engine.slots import Slot


class Broken(Exception):
    pass


@contextmanager
def failing(patch, edit, late):
    """`edit` fails where it is `patch` that asks for it."""
    asking = []
    originals = engine.Installer._install, engine.Installer._add, Slot._rebuild, Fields._rebuild

    def install(self, other, module):
        asking.append(other)
        try:
            originals[0](self, other, module)
        finally:
            asking.pop()

    def add(self, other, module):
        if asking[-1] is not patch or other is not edit:
            return originals[1](self, other, module)
        if not late:
            raise Broken(edit.target)
        broken = []

        def rebuild(original):
            def run(slot):
                original(slot)
                if not broken:  # putting it right again works
                    broken.append(slot)
                    raise Broken(edit.target)

            return run

        Slot._rebuild, Fields._rebuild = map(rebuild, originals[2:])
        try:
            originals[1](self, other, module)
        finally:
            Slot._rebuild, Fields._rebuild = originals[2:]
        if not broken:  # another patch of this set has installed it, or there is nothing to do
            raise Broken(edit.target)

    engine.Installer._install, engine.Installer._add = install, add
    try:
        yield
    finally:
        engine.Installer._install, engine.Installer._add = originals[:2]


def look() -> dict:
    real = engine.decide
    decisions = {patch.id: real(patch, _engine.installer.table) for patch in CATALOG}
    engine.decide = lambda patch, table: decisions[patch.id]  # the sources stay as they are
    installing = [patch for patch in CATALOG if decisions[patch.id].installs and any(map(has_place, patch.edits))]
    original = snapshot(declared())
    try:
        megatron_mtp_patches.apply()
        complete = in_force()
        megatron_mtp_patches.revert()
        return {
            "alone": {patch.id: fail_alone(patch, original) for patch in installing},
            "among others": {patch.id: fail_among_others(patch, complete, original) for patch in installing},
        }
    finally:
        engine.decide = real


def fail_alone(patch, original) -> dict:
    """What was left or misreported, at each position; how many positions there are."""
    wrong = []
    edits = [edit for edit in patch.edits if has_place(edit)]
    for position, edit in enumerate(edits):
        with failing(patch, edit, late=bool(position % 2)):
            megatron_mtp_patches.apply(patch.id, "skip")
        state, reason = _engine.installer.decision(patch).verdict.value, _engine.installer.decision(patch).reason
        left = [
            name for name in differences(original, snapshot(declared())) if name.rpartition(".")[2] not in BASE_NAMES
        ]
        if left or state != "refused" or edit.target not in reason:
            wrong.append([position, edit.target, left, state, reason])
        megatron_mtp_patches.revert()
        left = differences(original, snapshot(declared()))
        if left:
            wrong.append([position, edit.target, left, "after revert"])
    return {"positions": len(edits), "wrong": wrong}


def fail_among_others(patch, complete, original) -> dict:
    """The last edit of one patch fails under each policy, while the others apply."""
    edit = next(edit for edit in reversed(patch.edits) if has_place(edit))
    with failing(patch, edit, late=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            megatron_mtp_patches.apply("all", "warn")
        others = {id: found for id, found in in_force().items() if id != patch.id}
        wrong = [id for id, found in others.items() if found != complete[id]]
        state = _engine.installer.decision(patch).verdict.value
        try:
            megatron_mtp_patches.apply("all", "raise")
            raised = ""
        except megatron_mtp_patches.PatchError as error:
            raised = str(error)
    return {
        "target": edit.target,
        "state": state,
        "wrong": wrong,
        "warned": [str(warning.message) for warning in caught],
        "raised": raised,
        "left": differences(original, snapshot(declared())),
    }


def in_force() -> dict[str, list]:
    """How often each edit of each patch is in force; fields and flags, whether the class and the parser are ours."""
    return {patch.id: [is_there(edit) for edit in patch.edits] for patch in CATALOG}


def is_there(edit) -> object:
    if isinstance(edit, AddField):
        return edit.field in getattr(find_owner(edit)[0], edit.name).__dataclass_fields__
    return "flag" if isinstance(edit, AddFlag) else count(edit)


BASE_NAMES = {edit.name for patch in BASE for edit in patch.edits}
