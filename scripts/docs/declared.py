"""What the declarations say, as Markdown: the tables of patches and flags, the head of each patch's page."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_mtp_patches import _engine
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.description import SettingText, sections, settings
from megatron_mtp_patches.engine import Patch, PullRequest
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatrons import RELEASES
from packaging.version import Version

from scripts.common.markdown import table

COLUMNS = (*RELEASES, "main")


def blocks() -> dict[str, str]:
    """The tables of docs/patches.md, `flag-reference`, and one block for each patch, under its id."""
    tables = {"releases": releases_table(), "summaries": summaries()}
    return {**tables, "flag-reference": flag_reference(), **{patch.id: head(patch) for patch in CATALOG}}


def releases_table() -> str:
    """Patch x release: its state there."""
    rows = (
        [
            _page(patch),
            ", ".join(map(_link, patch.upstream)) or "none",
            *(state(patch, release) for release in COLUMNS),
        ]
        for patch in CATALOG
    )
    return "\n".join(table(["patch", "upstream", *COLUMNS], rows))


def summaries() -> str:
    """Each patch in a line, with its flags and fields."""
    rows = (
        [_page(patch), f"{patch.summary}.", ", ".join(f"`{one.name}`" for one in settings(patch))] for patch in CATALOG
    )
    return "\n".join(table(["patch", "what it does", "flags and config fields"], rows))


def flag_reference() -> str:
    """Each flag and each field without one, with its patch."""
    rows = (
        [
            "<br>".join(f"`{name}`" for name in dict.fromkeys((one.name, one.field)) if name),
            one.default,
            one.effect,
            _page(patch),
            "upstream's" if one.is_upstream else "ours",
        ]
        for patch in CATALOG
        for one in settings(patch)
    )
    return "\n".join(table(["flag and config field", "default", "effect", "patch", "whose"], rows))


def head(patch: Patch) -> str:
    """What stands under the title of the patch's page."""
    links = (f"[{change}]({_engine.project.pull_request_url(change)}) ({change.fate})" for change in patch.upstream)
    upstream = ", ".join(links) or "none"
    states = table(["upstream", *COLUMNS], [[upstream, *(state(patch, release) for release in COLUMNS)]])
    parts = [f"{patch.summary}.", "\n".join(states)]
    if found := settings(patch):
        parts.append("\n".join(table(["flag or config field", "default", "effect"], map(_cells, found))))
    for heading, paragraphs in sections(patch):
        parts.append(_section(heading, paragraphs))
    return "\n\n".join(parts)


def state(patch: Patch, release: str) -> State:
    """Applied, repaired or native. What upstream listed first decides; later changes to it are defects until then."""
    first = patch.upstream[0] if patch.upstream else None
    if first is None or first.native_since is None or _elsewhere(first) or _is_before(release, first.native_since):
        return State.APPLIED
    return State.REPAIRED if patch.repairs else State.NATIVE


def _is_before(release: str, other: str) -> bool:
    if "main" in (release, other):
        return release != "main"
    return Version(release) < Version(other)


def _section(heading: str, paragraphs: Iterable[str]) -> str:
    lines = list(paragraphs)
    if len(lines) == 1:
        return f"**{heading}:** {lines[0]}"
    return "\n".join([f"**{heading}:**", "", *(f"* {line}" for line in lines)])


def _page(patch: Patch) -> str:
    return f"[`{patch.id}`]({patch.id}.md)"


def _cells(setting: SettingText) -> list[str]:
    return [f"`{setting.name}`", setting.default, setting.effect]


def _link(change: PullRequest) -> str:
    link = f"[{change}]({_engine.project.pull_request_url(change)})"
    if _elsewhere(change):
        return f"{link} (its {change.native_since})"
    return link if change.native_since not in (None, "main") else f"{link} ({change.fate})"


def _elsewhere(change: PullRequest) -> bool:
    return change.repository != ""
