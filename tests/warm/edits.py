"""The edits that the patches declare, by name, and how a fork leaves one out."""

from __future__ import annotations

import inspect
import sys
from multiprocessing.connection import Client
from typing import Any


def declared() -> dict[str, list[tuple[str, Any]]]:
    """{name: [(the id of a patch, its edit)]}. Edits that share a name are left out together.

    The name is the target, and what the edit puts there: an override, a wrapper, a field or a flag.
    """
    from megatron_mtp_patches.catalog import BASE, CATALOG

    edits: dict[str, list[tuple[str, Any]]] = {}
    for patch in (*BASE, *CATALOG):
        for edit in patch.edits:
            edits.setdefault(f"{edit.target} {_added(edit)}", []).append((patch.id, edit))
    return edits


def megatron_edits() -> dict[str, list[str]]:
    """{name of an edit: the ids of its patches}, without the edits of other packages and of the base."""
    from megatron_mtp_patches.catalog import CATALOG

    megatrons = {patch.id for patch in CATALOG if not patch.package}
    patches = {name: [patch for patch, _ in some if patch in megatrons] for name, some in declared().items()}
    return {name: ids for name, ids in patches.items() if ids and not name.startswith(("megatron.bridge.", "swift."))}


def _added(edit: Any) -> str:
    return getattr(edit, edit.__match_args__[1])  # the first field is the target


def leave_out(name: str) -> None:
    """Take this edit out of every patch that declares it."""
    from megatron_mtp_patches.catalog import BASE, CATALOG

    left_out = [edit for _, edit in declared()[name]]
    for patch in (*BASE, *CATALOG):
        object.__setattr__(patch, "edits", tuple(edit for edit in patch.edits if edit not in left_out))


def send_effective(address: str) -> None:
    """Send the names of the edits that change something in this Megatron."""
    import megatron_mtp_patches
    from megatron_mtp_patches.engine.state import TargetState

    edits = {name: edit for name, [(_, edit), *_] in declared().items()}
    before = {name: _find(edit) for name, edit in edits.items()}
    had = {name: _has_field(edit) for name, edit in edits.items()}
    megatron_mtp_patches.apply()
    untouched = {  # by this patch; another one may edit the same function
        (report.id, target)
        for report in megatron_mtp_patches.status()
        for target, state in report.targets.items()
        if state is TargetState.UNTOUCHED
    }
    # If two modules have one class and each has an edit, the edit of the module that defines the class is applied.
    own = {(id(before[name]), _added(edit)) for name, edit in edits.items() if _is_own(edit, before[name])}
    effective = [
        name
        for name, edit in edits.items()
        if (_find(edit) is not before[name] or _has_field(edit) != had[name])
        and any((patch, edit.target) not in untouched for patch, _ in declared()[name])
        and (_is_own(edit, before[name]) or (id(before[name]), _added(edit)) not in own)
    ]
    with Client(address) as connection:
        connection.send(("effective", effective))


def _find(edit: Any) -> Any:
    """What is at the target; None if nothing is."""
    module, _, name = edit.target.partition(":")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None)
    return value


def _has_field(edit: Any) -> bool:
    return _added(edit) in getattr(_find(edit), "__dataclass_fields__", ())


def _is_own(edit: Any, value: Any) -> bool:
    return getattr(value, "__module__", None) == edit.target.partition(":")[0]
