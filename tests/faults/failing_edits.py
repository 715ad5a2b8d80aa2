"""Edits that fail. This is the one place where tests reach into the installer, which has no seam for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from megatron_mtp_patches.engine import Patch
from megatron_mtp_patches.engine.declare import Edit
from megatron_mtp_patches.engine.fields import Fields
from megatron_mtp_patches.engine.installer import Installer
from megatron_mtp_patches.engine.slots import Slot


class Broken(Exception):
    pass


@contextmanager
def failing(patch: Patch, edit: Edit, late: bool) -> Iterator[None]:
    """`edit` fails where it is `patch` that asks for it: before it has changed anything or, if `late`, after it has."""
    asking = []
    install, add = Installer._install, Installer._add

    def note_who_asks(self, other, module):
        asking.append(other)
        try:
            install(self, other, module)
        finally:
            asking.pop()

    def fail(self, other, module):
        if asking[-1] is not patch or other is not edit:
            add(self, other, module)
        elif late:
            with failing_once_rebuilt(edit) as failed:
                add(self, other, module)
            if not failed:  # another patch has installed it, or there is nothing to do
                raise Broken(edit.target)
        else:
            raise Broken(edit.target)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Installer, "_install", note_who_asks)
        monkeypatch.setattr(Installer, "_add", fail)
        yield


@contextmanager
def failing_once_rebuilt(edit: Edit) -> Iterator[list[str]]:
    """The next place that is rebuilt fails afterwards; later ones, which put it right, do not. Yields the failures."""
    failed: list[str] = []

    def break_down(rebuild):
        def run(place):
            rebuild(place)
            if not failed:
                failed.append(edit.target)
                raise Broken(edit.target)

        return run

    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in (Slot, Fields):
            monkeypatch.setattr(kind, "_rebuild", break_down(kind._rebuild))
        yield failed
