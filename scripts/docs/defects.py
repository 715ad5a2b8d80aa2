"""The known defects of Megatron, as Markdown: how many each release has, and what is known of each."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

from megatron_mtp_patches.cli.upstream_report import mark_flags
from megatron_mtp_patches.defects.catalog import defect_modules, known_defects, read_releases, releases_with
from megatron_mtp_patches.defects.declare import Defect, address_of, each
from megatron_mtp_patches.engine.fingerprints import ABSENT
from megatron_mtp_patches.megatrons.installed import known_sources
from megatron_mtp_patches.megatrons.known import DEFAULT
from megatron_mtp_patches.reproductions.runner import has_program

from scripts.common.markdown import table

from .addresses import address

SEVERITIES = (5, 4, 3, 2, 1)
MINOR = 3  # up to this severity the site alone lists them


def blocks() -> dict[str, str]:
    """What pages say of all known defects, by the names of the blocks."""
    return {
        "defects-by-release": by_release(),
        "removed-defects": removed(DEFAULT),
        "second-readings": second_readings(),
        "diffs": diffs(),
        "known-defects": "\n\n".join(filter(None, map(topic_list, defect_modules()))),
    }


def by_release() -> str:
    """Release x severity: how many known defects it has."""
    rows = []
    for release, answers in read_releases().items():
        here = [defect for defect in known_defects() if answers[defect.id]]
        counts = [sum(defect.severity == severity for defect in here) for severity in SEVERITIES]
        rows.append([release, *map(str, counts), str(len(here)), str(sum(bool(defect.patch) for defect in here))])
    heading = ["release", *(f"severity {severity}" for severity in SEVERITIES), "in all", "removed by a patch"]
    return "\n".join(table(heading, rows))


def removed(release: str) -> str:
    """How its known defects are known, how many of them the patches remove, and who else repairs these, for README."""
    answers = read_releases()[release]
    here = [defect for defect in known_defects() if answers[defect.id]]
    evidence = Counter(defect.evidence for defect in here)
    states = Counter(defect.state.split()[0] for defect in here if defect.patch)
    return (
        f"Of {len(here)} [known defects](docs/known-defects.md) of {release}, {evidence['reproduced']} were "
        f"reproduced, {evidence['read']} read in the source, {evidence['reported']} reported by others. The patches "
        f"remove {states.total()}: {states['fixed']} since fixed upstream, {states['open']} only reported there, "
        f"{states['unreported']} unreported to our knowledge."
    )


def second_readings() -> str:
    """Which declarations were read a second time, and with what each was compared."""
    rows = [[defect.id, defect.second_reading] for defect in known_defects() if defect.second_reading]
    severe = [defect for defect in known_defects() if defect.patch or defect.severity > MINOR]
    read = sum(bool(defect.second_reading) for defect in severe)
    count = f"{read} of the {len(severe)} that are of severity 4 and 5 or have a patch, {len(rows)} in all."
    return "\n".join([count, "", *table(["id", "compared with"], rows)])


def diffs() -> str:
    """The defects whose repair `export --diff` writes, and the function that it changes."""
    sources, rows = known_sources(), []
    for one in known_defects():
        if one.diff:
            fingerprints = sources.targets[one.diff.target].items()
            with_function = {name for digest, names in fingerprints if digest != ABSENT for name in names}
            releases = [name for name in releases_with(one) if name in with_function]
            span = " to ".join(dict.fromkeys((releases[0], releases[-1])))
            rows.append(
                [f"[{one.id}]({address(one.patch)})", str(one.severity), span, f"`{one.diff.target}`", one.effect]
            )
    return "\n".join(table(["defect", "severity", "a diff for", "function", "what it does"], rows))


def topic_list(module: ModuleType) -> str:
    """The severe defects of a module, the most severe first, under its title; '' if it has none."""
    title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
    lines = [line(defect) for defect in known_defects() if defect in module.DEFECTS and defect.severity > MINOR]
    return "\n".join([f"### {title}", "", *lines]) if lines else ""


def minor_defects() -> str:
    """The other defects, for the site."""
    return "\n".join(line(defect) for defect in known_defects() if defect.severity <= MINOR)


def line(defect: Defect) -> str:
    """Its effect, whom it affects, and the ways out."""
    ways = defect.ways_out(lambda patch: f"[{patch}]({address(patch)})")
    sure = "`reproduce`" if has_program(defect.id) else defect.evidence
    name = link(f"**{defect.id}**", defect.links[0]) if defect.links else f"**{defect.id}**"
    way_out = f" *Way out:* {ways}." if ways else ""
    return mark_flags(
        f"* {name} ({defect.severity}, {sure}, {releases_of(defect)}, {defect.state}): {defect.effect}. *With* "
        f"{defect.condition}.{way_out}"
    )


def releases_of(defect: Defect) -> str:
    """The known releases that have it; the first and the last, where it is all between them."""
    known, found = list(read_releases()), releases_with(defect)
    if not found:
        targets = ", ".join(sign.target for sign in each(defect.signs))
        raise SystemExit(f"{defect.id}: no known Megatron has what its signs say ({targets}): correct the signs")
    span = known[known.index(found[0]) : known.index(found[-1]) + 1]
    return f"{found[0]} to {found[-1]}" if len(found) > 1 and found == span else ", ".join(found)


def link(text: str, name: str) -> str:
    """A link to a pull request or an issue of upstream's."""
    return f"[{text}]({address_of(name)})"
