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


def patches_with(name: str) -> list[str]:
    """The ids of the patches that declare this edit."""
    from megatron_mtp_patches.catalog import BASE, CATALOG

    return [patch.id for patch in (*BASE, *CATALOG) if name in map(name_of, patch.edits)]


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

    edits = declared()
    before = {name: _find(edit) for name, edit in edits.items()}
    had = {name: _has_field(edit) for name, edit in edits.items()}
    megatron_mtp_patches.apply()
    # If two modules have one class and each has an edit, the edit of the module that defines the class is applied.
    own = {(id(before[name]), _added(edit)) for name, edit in edits.items() if _is_own(edit, before[name])}
    found = [
        name
        for name, edit in edits.items()
        if (_find(edit) is not before[name] or _has_field(edit) != had[name])
        and (_is_own(edit, before[name]) or (id(before[name]), _added(edit)) not in own)
    ]
    Path(file).write_text(json.dumps(found))
    os._exit(0)


def _find(edit: Any) -> Any:
    """What is at the target; None if nothing is."""
    module, _, name = edit.target.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    return found


def _has_field(edit: Any) -> bool:
    return _added(edit) in getattr(_find(edit), "__dataclass_fields__", ())


def _is_own(edit: Any, found: Any) -> bool:
    return getattr(found, "__module__", None) == edit.target.partition(":")[0]
