"""The edits that the patches declare, by name; what a fork does to leave one out."""

from __future__ import annotations

import inspect
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any


def declared() -> dict[str, Any]:
    """{name: edit}. Edits that put the same thing at the same target share a name, and are left out together."""
    from megatron_mtp_patches.catalog import BASE, CATALOG

    return {name_of(edit): edit for patch in (*BASE, *CATALOG) for edit in patch.edits}


def name_of(edit: Any) -> str:
    """The target, and what the edit puts there: an override, a wrapper, a field or a flag."""
    return f"{edit.target} {_added(edit)}"


def _added(edit: Any) -> str:
    return getattr(edit, fields(edit)[1].name)  # the first field is the target


def leave_out(name: str) -> None:
    """Take this edit out of every patch that declares it."""
    from megatron_mtp_patches.catalog import BASE, CATALOG

    for patch in (*BASE, *CATALOG):
        object.__setattr__(patch, "edits", tuple(edit for edit in patch.edits if name_of(edit) != name))


def write_effective(file: str) -> None:
    """Write the names of the edits that change something in this Megatron to `file`, and end the process."""
    import megatron_mtp_patches

    before = {name: _what_is_there(edit) for name, edit in declared().items()}
    megatron_mtp_patches.apply()
    after = {name: _what_is_there(edit) for name, edit in declared().items()}
    Path(file).write_text(json.dumps([name for name in before if after[name] != before[name]]))
    os._exit(0)


def _what_is_there(edit: Any) -> tuple[int, bool]:
    """(which object is at the target, whether it has the field that the edit adds)."""
    module, _, name = edit.target.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    return id(found), _added(edit) in getattr(found, "__dataclass_fields__", ())
