"""Whose change a patch is, and what makes it superfluous: by its declaration and the known defects that it removes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from ..defects.catalog import removed_by
from ..defects.declare import Defect, address_of
from ..engine import Patch, PullRequest
from ..engine.state import State
from ..megatron_engine import ENGINE
from .known import VERSIONS
from .states_by_release import state_in

Write = Callable[[str, str], str]  # makes a link of a name and an address


class Origin(str, Enum):
    """Whose change a patch is. The first pull request that the patch brings decides."""

    MERGED = "merged"  # upstream's, in a known Megatron or merged since
    REPAIRED = "merged and repaired"  # the same, without defects that upstream's version has
    OPEN = "open"  # upstream's, not in main
    CLOSED = "closed"  # upstream's, given up there
    REPORTED = "ours, reported"  # no pull request; the defects that it removes are reported upstream
    PARTLY_REPORTED = "ours, partly reported"  # no pull request; some of the defects are reported upstream
    UNREPORTED = "ours, unreported"  # no pull request; nobody has reported a defect that it removes
    NEW = "ours"  # no pull request and no known defect

    __str__ = str.__str__


def origin_of(patch: Patch) -> Origin:
    """Whose change it is."""
    left = defects_left(patch)
    if not patch.upstream:
        if not left:
            return Origin.NEW
        reported = [_is_reported(defect) for defect in left]
        if all(reported):
            return Origin.REPORTED
        return Origin.PARTLY_REPORTED if any(reported) else Origin.UNREPORTED
    if patch.upstream[0].ended == "closed":
        return Origin.CLOSED
    if not patch.upstream[0].is_merged:
        return Origin.OPEN
    return Origin.REPAIRED if left or patch.repairs else Origin.MERGED


def count_origins(patches: Iterable[Patch]) -> Counter[Origin]:
    """How many of these patches have which origin."""
    return Counter(map(origin_of, patches))


def defects_left(patch: Patch) -> list[Defect]:
    """The defects that a patch removes, and that neither a fix nor a pull request of the patch removes upstream."""
    awaited = {
        f"{one.repository or ENGINE.project.repository}#{one.number}" for one in patch.upstream if one.is_awaited
    }
    return [
        defect
        for defect in removed_by(patch)
        if not defect.is_fixed and not (defect.state == "open" and awaited.intersection(defect.links))
    ]


def retired_in(patch: Patch) -> str | None:
    """The first known Megatron in which it is native; None where none is."""
    return next((release for release in VERSIONS if state_in(patch, release) is State.NATIVE), None)


def describe_origin(patch: Patch, write: Write) -> str:
    """Say whose change it is, with links to the pull requests and to reports of the defects that upstream has left."""
    left = defects_left(patch)
    if not patch.upstream:
        return f"ours; {_describe_reports(left, write)}" if left else "ours"
    changes = ", ".join(f"{_write_change(one, write)} ({one.fate})" for one in patch.upstream)
    reports = f" ({_describe_reports(left, write)})" if left else ""
    return f"upstream's {changes}" + (f", with repairs of ours{reports}" if left or patch.repairs else "")


def describe_retirement(patch: Patch, write: Write) -> str:
    """Say when a run can do without it, as the end of a sentence that begins with "when"."""
    release, first = retired_in(patch), next(iter(patch.upstream), None)
    if release:
        return f"Megatron {release} has it" if release != "main" else "a release has it, as upstream's main does"
    left = _enumerate([_write_defect(defect, write) for defect in defects_left(patch)])
    if first and first.native_since:
        if first.repository:
            return f"{patch.package} {first.native_since} has it"
        # it has repairs, or it would be native
        return "upstream repairs its version as this patch does" + (f": {left}" if left else "")
    closed = _enumerate([_write_change(one, write) for one in patch.upstream if one.ended == "closed"])
    awaited = _enumerate([_write_change(one, write) for one in patch.upstream if one.is_awaited])
    release_has = f"a release has {awaited}" + (", with the repairs of this patch" if patch.repairs else "")
    conditions = [release_has] * bool(awaited) + [f"upstream repairs {left}"] * bool(left)
    never = f"never by itself: {f'upstream has closed {closed}' if closed else 'no pull request has it'}"
    return " and ".join(conditions) or never


def _describe_reports(defects: list[Defect], write: Write) -> str:
    reported = list(filter(_is_reported, defects))
    if links := _write_links(reported, write):
        some = f"{len(reported)} of the {len(defects)} defects {'is' if len(reported) == 1 else 'are'} "
        return (some if len(reported) < len(defects) else "") + f"reported in {links}"
    return f"nobody has reported the {'defect' if len(defects) == 1 else f'{len(defects)} defects'}"


def _is_reported(defect: Defect) -> bool:
    return defect.state != "unreported"


def _write_defect(defect: Defect, write: Write) -> str:
    links = _write_links([defect], write)
    return f"{defect.id} ({links})" if links else defect.id


def _write_links(defects: Iterable[Defect], write: Write) -> str:
    links = dict.fromkeys(link for defect in defects for link in defect.links)
    return ", ".join(write(link.removeprefix(ENGINE.project.repository), address_of(link)) for link in links)


def _write_change(change: PullRequest, write: Write) -> str:
    return write(str(change), ENGINE.project.pull_request_url(change))


def _enumerate(words: list[str]) -> str:
    """These as "one, two and three"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
