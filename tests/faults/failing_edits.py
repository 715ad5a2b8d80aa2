"""Edits that fail. This is the one place where tests reach into what installs them, which has no seam for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.added_fields import AddedFields
from megatron_mtp_patches.engine.declare import Edit
from megatron_mtp_patches.engine.installer import Installer
from megatron_mtp_patches.engine.patched_attribute import PatchedAttribute


class Broken(Exception):
    pass


@contextmanager
def failing(patch: Patch, edit: Edit, late: bool) -> Iterator[None]:
    """`edit` fails where it is `patch` that asks for it: before it has changed anything or, if `late`, after it has."""
    add = Installer._add

    def fail(self, other, asking, module):
        if asking is not patch or other is not edit:
            add(self, other, asking, module)
        elif late:
            with failing_once_rebuilt(edit) as failed:
                add(self, other, asking, module)
            if not failed:  # another patch has installed it, or there is nothing to do
                raise Broken(edit.target)
        else:
            raise Broken(edit.target)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Installer, "_add", fail)
        yield


@contextmanager
def failing_once_rebuilt(edit: Edit) -> Iterator[list[str]]:
    """The next target that is rebuilt fails afterwards; later ones, which put it right, do not. Yields the failures."""
    failed: list[str] = []

    def break_down(rebuild):
        def run(target):
            rebuild(target)
            if not failed:
                failed.append(edit.target)
                raise Broken(edit.target)

        return run

    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in (PatchedAttribute, AddedFields):
            monkeypatch.setattr(kind, "_rebuild", break_down(kind._rebuild))
        yield failed
