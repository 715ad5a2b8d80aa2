"""The declarations as Markdown: tables of patches and flags, the first part of the section of each patch."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from megatron_mtp_patches import cli
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.cli.explain import sections
from megatron_mtp_patches.declarations.description import SettingText, setting_texts
from megatron_mtp_patches.defects.catalog import removed_by
from megatron_mtp_patches.engine import AddField, AddFlag, Edit, Override, Patch, PullRequest, Wrap
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.megatrons.known import RELEASES, TRANSFORMER_ENGINE, VERSIONS
from megatron_mtp_patches.megatrons.origins import (
    Origin,
    count_origins,
    describe_origin,
    describe_retirement,
    origin_of,
)
from megatron_mtp_patches.megatrons.states_by_release import state_in

from scripts.common.markdown import table
from scripts.common.process import ROOT
from scripts.common.toml import read_toml

from .addresses import address, topic

# The texts that stand in git of a repair and of any other patch; the site and `explain` have all of a declaration.
OF_REPAIRS, OF_OTHERS = ("Without it", "Changes numbers", "Note"), ("Adds", "Changes numbers", "Note")
_COLUMNS = ["patch", "what it does", "severity", "whose"]
# Several pages show it; tests/end_to_end/test_shown_commands.py runs it.
CPU = """\
<!-- run by a test: cpu-command -->
```bash
ARGS="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --bf16 --transformer-impl local
    --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 2 --mtp-detach-heads
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-iters 0 --eval-interval 1000"
megatron-mtp-patches run --device cpu pretrain_gpt.py $ARGS
```"""


def blocks() -> dict[str, str]:
    """What pages say of all patches, commands and exit codes, and a block for each patch, under its id."""
    _, _, exit_codes = str(cli.__doc__).partition(":\n\n")
    commands = {"cpu-command": CPU, "exit-codes": f"```text\n{exit_codes.rstrip()}\n```"}
    tables = {"patches": patches(), "flag-reference": flag_reference(), "unchecked-edits": unchecked_edits()}
    tables |= {"unasked": unasked(), "origins": origins()}
    upgrade = {
        "upgrade-steps": "\n".join(filter(None, map(changes, VERSIONS[:-1], VERSIONS[1:]))),
        "checkpoints": checkpoints(),
    }
    return {**commands, **tables, **upgrade, **{patch.id: head(patch) for patch in CATALOG}}


def patches() -> str:
    """Each patch in a line, those of a topic together."""
    return "\n".join(table(_COLUMNS, map(_row, _by_topic())))


def table_of_patches() -> str:
    """The same with the states of each patch, and whether the profile `repairs` has it."""
    rows = ([*_row(patch), _states(patch), _part_in_repairs(patch) or "no"] for patch in _by_topic())
    return "\n".join(table([*_COLUMNS, "state", "in `repairs`"], rows))


def _by_topic() -> list[Patch]:
    return sorted(CATALOG, key=lambda patch: topic(patch.id))


def _row(patch: Patch) -> list[str]:
    """The cells of _COLUMNS; the severity is that of the worst defect, and empty where the patch removes none."""
    severity = max((str(defect.severity) for defect in removed_by(patch)), default="")
    origin = str(origin_of(patch))
    return [
        _page(patch),
        f"{patch.summary}.",
        severity,
        origin if origin.startswith("ours") else f"upstream's, {origin}",
    ]


def _states(patch: Patch) -> str:
    """The state in the oldest version, and each change of it; for a patch of another package, where it was tried."""
    if patch.package:
        tried = (
            f"{patch.package} {version} on {release}" for release, version in _tried_versions(patch.package).items()
        )
        return f"{state_in(patch, VERSIONS[0])} ({', '.join(tried)})"
    states = [str(state_in(patch, VERSIONS[0]))]
    for before, after in pairwise(VERSIONS):
        if state_in(patch, before) != state_in(patch, after):
            states.append(f"{state_in(patch, after)} {'on' if after == 'main' else 'from'} {after}")
    return ", ".join(states)


def _tried_versions(package: str) -> dict[str, str]:
    """{release: the version of the package with which CI tries it}"""
    if package == "transformer-engine":
        return TRANSFORMER_ENGINE
    matrix = read_toml(ROOT / "ci" / "matrix.toml")
    wanted = {release: matrix["packages"] for release in RELEASES}
    for one in matrix["environment"]:
        installed = [*one["installs"], *one.get("alone", [])]
        wanted[one["release"]] = [*wanted[one["release"]], *installed]
    pinned = re.compile(rf"{re.escape(package)}==([\d.]+)", re.IGNORECASE)
    return {release: match[1] for release, words in wanted.items() for match in map(pinned.match, words) if match}


def _part_in_repairs(patch: Patch) -> str:
    if patch.is_repair:
        return "yes"
    return (
        "on releases where it is *repaired*"
        if State.REPAIRED in {state_in(patch, release) for release in VERSIONS}
        else ""
    )


def unasked() -> str:
    """What the patches change that are no repairs, in a run that sets none of their settings."""
    patches: dict[tuple[str, str], list[str]] = {}
    for patch in CATALOG:
        if patch.unasked:
            patches.setdefault((patch.unasked, patch.turned_off_by), []).append(_page(patch))
    rows = ([change, ", ".join(pages), setting] for (change, setting), pages in patches.items())
    return "\n".join(table(["what changes", "patch", "turned off by"], sorted(rows, key=lambda row: not row[2])))


def flag_reference() -> str:
    """Each flag and each field without one, with its patch."""
    rows = (
        [
            "<br>".join(f"`{name}`" for name in dict.fromkeys((one.name, one.field)) if name),
            one.default,
            one.effect,
            _page(patch),
            _owner(patch, one),
        ]
        for patch in CATALOG
        for one in setting_texts(patch)
    )
    return "\n".join(table(["flag and config field", "default", "effect", "patch", "whose"], rows))


def _owner(patch: Patch, setting: SettingText) -> str:
    """Whose flag and field it is."""
    if setting.is_upstream:
        return "upstream's"
    change = next((change for change in patch.upstream if change.number == setting.named_in), None)
    return f"ours; {_link(change)} has one of this name" if change else "ours"


def origins() -> str:
    """Whose the patches are, for README."""
    counts = count_origins(CATALOG)
    merged = counts[Origin.MERGED] + counts[Origin.REPAIRED]
    ours = sum(count for origin, count in counts.items() if origin.startswith("ours"))
    return (
        f"Of the {counts.total()} patches, {merged} port merged upstream changes ({counts[Origin.REPAIRED]} with fixes "
        f"of ours), {counts[Origin.OPEN]} open pull requests, {counts[Origin.CLOSED]} a closed one; {ours} are ours. "
        f"[Each section](docs/patches.md) says which."
    )


def worker(edit: Edit) -> str:
    """The code of an edit; with its target, the name of the edit."""
    if isinstance(edit, AddField):
        return f"the field {edit.field}"
    return f"the flag {edit.flag}" if isinstance(edit, AddFlag) else edit.implementation


def unchecked_edits() -> str:
    """The edits that are made even if the source of their target is unknown, and why that is safe."""
    edits = {(edit.target, worker(edit)): edit for patch in (*BASE, *CATALOG) for edit in patch.edits}.values()
    counts = Counter(type(edit) for edit in edits if not edit.check_source)
    wraps = sum(type(edit) is Wrap for edit in edits)
    kinds = {
        Wrap: f"of the {wraps} wrappers. These depend on the name and the parameters of the function alone, and pass "
        "on what they do not know",
        Override: "names that are added where a Megatron lacks them. One that exists stays as it is",
        AddField: "field of Megatron-Bridge's configuration, with a default, which the patches alone read",
        AddFlag: "flags of the command line. They are added to the parser that Megatron returns",
    }
    assert counts.keys() == kinds.keys(), "say why these are safe"
    rows = [f"* {counts[kind]} {text} (`{kind.__name__}`)." for kind, text in kinds.items()]
    intro = (
        f"{counts.total()} of the {len(edits)} edits do not depend on the source of their target, so they are made "
        "even if that source is unknown. If the module is there but lacks the function, the patch is still refused."
    )
    return "\n".join([intro, "", *rows])


def changes(before: str, after: str) -> str:
    """The patches whose state changes at the release `after`; '' if it changes for none."""
    changed = [patch for patch in CATALOG if state_in(patch, before) != state_in(patch, after)]
    native = [_page(patch) for patch in changed if state_in(patch, after) is State.NATIVE]
    repaired = [_page(patch) for patch in changed if state_in(patch, after) is not State.NATIVE]
    parts = [f"drop {', '.join(native)}"] * bool(native) + [f"keep {', '.join(repaired)}"] * bool(repaired)
    return f"* {after}: {'; '.join(parts)}." if parts else ""


def checkpoints() -> str:
    """The patches that say something of checkpoints."""
    notes = {_page(patch): None for patch in CATALOG for note in patch.notes if note.startswith("Checkpoint")}
    return f"{', '.join(notes)}."


def head(patch: Patch) -> str:
    """The text under the title of the patch's section."""
    shown = [text for text in sections(patch) if text[0] in (OF_REPAIRS if patch.is_repair else OF_OTHERS)]
    parts = [*_summary(patch), *(_section(heading, list(paragraphs)) for heading, paragraphs in shown)]
    if removed := [defect.id for defect in removed_by(patch)]:
        parts.append(_section("Known defects that it removes", [f"{', '.join(removed)}."]))
    return "\n\n".join(parts)


def whole_head(patch: Patch) -> str:
    """The same with every text of the declaration, as `explain` prints it."""
    parts = [*_summary(patch), *(_section(heading, list(paragraphs)) for heading, paragraphs in sections(patch))]
    return "\n\n".join(parts)


def _summary(patch: Patch) -> list[str]:
    """In a sentence, its states, whose it is and until when it is needed, and its flags."""
    origin, retirement = describe_origin(patch, "[{}]({})".format), describe_retirement(patch, "[{}]({})".format)
    repairs = f" *In `repairs`:* {part}." if (part := _part_in_repairs(patch)) else ""
    flags = ", ".join(f"`{one.name}`" for one in setting_texts(patch))
    state, whose = f"*State:* {_states(patch)}.{repairs}", f"*Whose:* {origin}. *Retire when:* {retirement}."
    parts = [f"{patch.summary}.", state, whose]
    return [*parts, f"**[Flags](flags.md):** {flags}."] if flags else parts


def _section(heading: str, lines: list[str]) -> str:
    if len(lines) == 1:
        return f"**{heading}:** {lines[0]}"
    return "\n".join([f"**{heading}:**", "", *(f"* {line}" for line in lines)])


def _page(patch: Patch) -> str:
    return f"[`{patch.id}`]({address(patch.id)})"


def _link(change: PullRequest) -> str:
    link = f"[{change}]({ENGINE.project.pull_request_url(change)})"
    if change.repository:
        return f"{link} (its {change.native_since})"
    return link if change.native_since not in (None, "main") else f"{link} ({change.fate})"
