"""Names the known defects that a finding of watch-invariants may come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ..defects.catalog import known_defects
from .findings import Finding, find_defects, settings_here

SHOWN = 3


def name_causes(relation: str | None, sources: Iterable[object]) -> str:
    """Name known defects of this Megatron that affect the run, that no patch removes, and that the relation sees.

    Args:
        relation: the one that does not hold, as in Defect.seen_by; None for one by which no defect is known to be seen.
        sources: Megatron's arguments, or the configurations of a trainer.

    Returns:
        A part of a line that begins with a semicolon; '' for none.
    """
    causes = _find(relation, sources)
    named = [f"{one.id} ({one.remedy}; see `megatron-mtp-patches explain {one.id}`)" for one in causes[:SHOWN]]
    more = f" and {len(causes) - SHOWN} more" if len(causes) > SHOWN else ""
    return f"; known: {', '.join(named)}{more}" if named else ""


def _find(relation: str | None, sources: Iterable[object]) -> list[Finding]:
    """Return the defects, the most severe first. One whose condition or source cannot be read is left out."""
    causes: list[Finding] = []
    with contextlib.suppress(Exception):
        settings, known = settings_here(sources), known_defects()
        for defect in known:
            if defect.seen_by == relation:
                with contextlib.suppress(Exception):
                    affecting = find_defects(settings, [one for one in known if one.id in (defect.id, defect.after)])
                    causes += [one for one in affecting if one.id == defect.id and not one.is_removed]
    return causes
