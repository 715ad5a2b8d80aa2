"""`export --diff ID ...`: small repairs as a patch file for somebody's own Megatron."""

from __future__ import annotations

import re
import shlex
import sys

from .. import __version__
from ..defects.catalog import known_defects
from ..defects.declare import Defect, Diff, address_of
from ..defects.probe import has_defect
from ..defects.rewriting import is_known, make_unified_diffs
from ..engine import UsageError
from ..engine.declare import Edit
from ..engine.fingerprints import ABSENT, fingerprint
from ..engine.similar_names import did_you_mean
from ..engine.source import find_file
from ..megatrons.installed import known_sources
from ..reproductions.runner import has_program
from .against import read_path


def export_diff(ids: list[str], against: str | None) -> int:
    """Print a patch file that repairs these defects, the most severe first, each on top of the ones before.

    Without ids it repairs each defect that has a diff and that this Megatron has, where the function has a known
    source.

    Raises:
        PatchError: there is no Megatron.
        UsageError: `against` has none; an id is unknown, or there is no diff for it; this Megatron does not have the
            defect, or its function has an unknown source.
    """
    path = read_path(against)
    for name in ids:
        _check_id(name)
    diffs = {one: one.diff for one in known_defects() if one.diff and (one.id in ids or not ids)}
    absent = [one for one in diffs if not has_defect(one, path)]
    unknown = [one for one in diffs if one not in absent and not is_known(diffs[one], known_sources(), path)]
    notes = [f"this Megatron does not have {one.id}" for one in absent if ids]
    notes += [_describe_unknown(one, diffs[one], path) for one in unknown]
    if ids and notes:
        raise UsageError("; ".join(notes))
    defects = [one for one in diffs if one not in absent + unknown]
    for defect, text in zip(defects, make_unified_diffs([diffs[one] for one in defects], path), strict=True):
        print(f"{_describe(defect)}\n\n{text}")
    if defects:
        folder = str(find_file("megatron.core", path)).partition("/megatron/core/")[0]
        notes.append(f"{len(defects)} diff{'s' * (len(defects) > 1)}: patch -p1 -d {shlex.quote(folder)} < FILE")
        notes.append("This takes the place of the package: do not import it there, or set MEGATRON_MTP_PATCHES=none")
    else:
        notes.append("no diffs: this Megatron has no other defect that has one")
    print("\n".join(notes), file=sys.stderr)
    return 0


def _describe_unknown(defect: Defect, diff: Diff, path: list[str] | None) -> str:
    """Why there is no diff for a defect that this Megatron has."""
    if fingerprint(Edit(diff.target), path) == ABSENT:
        way_out = defect.ways_out("patch {}".format)
        return f"no diff for {defect.id} here, where there is no {diff.target}; way out: {way_out}"
    return (
        f"no diff for {defect.id}: {diff.target} does not have the source of a known release. If another diff has "
        f"changed it, export all diffs at once, for the source without any"
    )


def _check_id(name: str) -> None:
    ids = {defect.id: defect for defect in known_defects()}
    if removed := [defect.id for defect in known_defects() if defect.patch == name]:
        raise UsageError(f"{name} is a patch: give the ids of defects that it removes: {', '.join(removed)}")
    if name not in ids:
        raise UsageError(f"{name!r} is no id of a known defect{did_you_mean(name, ids)}; `audit` lists them")
    if ids[name].diff is None:
        way_out = ids[name].ways_out("patch {}".format) or "none known"
        raise UsageError(f"there is no diff for {name}, whose repair is no small one; way out: {way_out}")


def _describe(defect: Defect) -> str:
    """What a reader of the patch file has to know, as a header in the form of DEP-3, which `patch` passes over."""
    fields = {
        "Description": f"{defect.effect} ({defect.id}, severity {defect.severity})",
        "Affects": defect.condition,
        "Stays-With": defect.not_removed_with,
        "Origin": f"megatron_mtp_patches {__version__}; its command `explain {defect.patch}` says what changes",
        "Bug": defect.describe_upstream(address_of),
        "Remove-When": _describe_end(defect),
        "Shown-By": f"megatron-mtp-patches reproduce {defect.id}" if has_program(defect.id) else "",
    }
    return "\n".join(f"{name}: {text}" for name, text in fields.items() if text)


def _describe_end(defect: Defect) -> str:
    """When a Megatron needs the diff no longer."""
    if release := re.match(r"fixed in ([\d.]+)$", defect.state):
        return f"megatron-core is {release[1]} or newer"
    if defect.is_fixed:
        return f"megatron-core has what upstream has ({defect.state})"
    return "upstream has repaired it; no known Megatron has"
