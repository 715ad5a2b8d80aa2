"""The known defects of Megatron, as Markdown: how many each release has, a table for each topic, and reports."""

from __future__ import annotations

import re
from types import ModuleType

from megatron_mtp_patches.cli.audit import condition_of, range_of_patch
from megatron_mtp_patches.defects.catalog import defect_modules, known_defects, read_releases, releases_with
from megatron_mtp_patches.defects.declare import Defect
from megatron_mtp_patches.defects.runner import find_program
from megatron_mtp_patches.megatrons.known import DEFAULT

from scripts.common.markdown import table

from .addresses import address

SEVERITIES = (5, 4, 3, 2, 1)


def blocks() -> dict[str, str]:
    """What pages say of all known defects, by the names of the blocks."""
    unreported = [defect for defect in known_defects() if defect.state == "unreported"]
    return {
        "defects-by-release": by_release(),
        "removed-defects": removed(DEFAULT),
        "known-defects": "\n\n".join(map(topic_table, defect_modules())),
        "upstream-reports": "\n\n".join(map(report, unreported)),
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
    """How many of its known defects the patches remove, and what upstream has of these, for README."""
    answers = read_releases()[release]
    here = [defect for defect in known_defects() if answers[defect.id]]
    states = [defect.state.split()[0] for defect in here if defect.patch]
    fixed, reported, unreported = (states.count(state) for state in ("fixed", "open", "unreported"))
    return (
        f"Of the {len(here)} [known defects](docs/known-defects.md) of {release} the patches remove {len(states)}. "
        f"Upstream has fixed {fixed} of these in newer code. No known Megatron repairs the other "
        f"{reported + unreported}: {reported} have an open issue or pull request, and nobody has reported {unreported}."
    )


def topic_table(module: ModuleType) -> str:
    """The defects of a module, the most severe first, under its title."""
    title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
    rows = [row(defect) for defect in sorted(module.DEFECTS, key=lambda defect: -defect.severity)]
    heading = ["id", "sev.", "what happens", "with", "releases", "way out", "upstream"]
    return "\n".join([f"### {title}", "", *table(heading, rows)])


def row(defect: Defect) -> list[str]:
    ways = [f"[{defect.patch}]({address(defect.patch)}){range_of_patch(defect)}"] if defect.patch else []
    ways += [defect.instead] if defect.instead else []
    shown = "; `reproduce` shows it" if find_program(defect.id) else f"; {defect.evidence}"
    return [
        defect.id,
        str(defect.severity),
        mark_flags(f"{defect.effect} ({defect.kind}{shown})"),
        mark_flags(condition_of(defect)),
        ", ".join(releases_with(defect)),
        mark_flags("; or ".join(ways)) or "none known",
        defect.describe_upstream(link),
    ]


def report(defect: Defect) -> str:
    """What an issue at upstream's would say, under its title."""
    places = ", ".join(dict.fromkeys(f"`{sign.target}`" for sign in defect.signs))
    paragraphs = [
        f"### {mark_flags(defect.effect)}",
        f"It affects runs with {mark_flags(condition_of(defect))}, on {', '.join(releases_with(defect))}. The code: "
        f"{places}.",
    ]
    if defect.introduced_by:
        paragraphs.append(f"It was introduced by {', '.join(map(link, defect.introduced_by))}.")
    if program := find_program(defect.id):
        paragraphs.append(
            f"To reproduce: {' '.join((program.__doc__ or '').split())} `megatron-mtp-patches reproduce {defect.id} "
            f"--standalone FILE` writes the program."
        )
    else:
        paragraphs.append(f"It was {defect.evidence}; there is no program for it.")
    if defect.patch:
        paragraphs.append(f"A way to repair it: [{defect.patch}]({address(defect.patch)}).")
    return "\n\n".join(paragraphs)


def mark_flags(text: str) -> str:
    """The flags as code."""
    return re.sub(r"(?<![\w`])--[a-zA-Z][\w-]*", r"`\g<0>`", text)


def link(name: str) -> str:
    """A pull request or an issue of upstream's: GitHub leads from the one address to either."""
    repository, _, number = name.partition("#")
    return f"[#{number}](https://github.com/{repository}/issues/{number})"
