"""Makes a mutant of a warm process: runs in a fork, before pytest."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def change(mutant: dict[str, Any]) -> None:
    """Leave out the edits `dropped`, [(patch, position)], or let `module` have `source`."""
    assert not any(name.partition(".")[0] == "megatron_overrides" for name in sys.modules)
    if mutant["dropped"]:
        leave_out({(patch, position) for patch, position in mutant["dropped"]})
    elif mutant["module"]:
        sys.meta_path.insert(0, _Changed(mutant["module"], mutant["file"], mutant["source"]))


def leave_out(dropped: set[tuple[str, int]]) -> None:
    """Take these edits out of the catalog and the engine."""
    from megatron_mtp_patches import _engine, catalog

    def left(patches: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(
                patch, edits=tuple(edit for n, edit in enumerate(patch.edits) if (patch.id, n) not in dropped)
            )
            for patch in patches
        )

    catalog.CATALOG, catalog.BASE = left(catalog.CATALOG), left(catalog.BASE)
    _engine.catalog, _engine.base = catalog.CATALOG, catalog.BASE


class _Changed(MetaPathFinder, SourceLoader):
    """Finds one module with another source."""

    def __init__(self, module: str, file: str, source: str) -> None:
        self.module, self.file, self.source = module, file, source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=self.file) if name == self.module else None

    def get_filename(self, fullname: str) -> str:
        return self.file

    def get_data(self, path: Any) -> bytes:
        return self.source.encode()


def tell_effective(file: str) -> None:
    """Write to `file` the edits that do something in this release, as [patch, position], and end the process."""
    import megatron_mtp_patches
    from megatron_mtp_patches import _engine

    megatron_mtp_patches.apply()
    found = [
        [patch.id, position]
        for patch in (*_engine.base, *_engine.catalog)
        for position, edit in enumerate(patch.edits)
        if _does_something(edit)
    ]
    Path(file).write_text(json.dumps(found))
    os._exit(0)


def _does_something(edit: Any) -> bool:
    from megatron_mtp_patches import _engine
    from megatron_mtp_patches.engine import AddField, AddIfMissing
    from megatron_mtp_patches.engine.fingerprints import target_exists
    from megatron_mtp_patches.engine.patched_attribute import MISSING

    edits = _engine._session.installer.edits
    if edit not in edits or not target_exists(edit):
        return False
    if isinstance(edit, AddField):
        fields = getattr(sys.modules[edit.module], edit.name).__dataclass_fields__
        return "added_in_place" in fields[edit.field].metadata
    return not isinstance(edit, AddIfMissing) or edits.attribute(edit.target).original is MISSING
