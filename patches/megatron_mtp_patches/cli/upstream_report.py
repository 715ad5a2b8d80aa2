"""`reproduce ID --report`: an issue for upstream in Markdown, in the sections of Megatron-LM's form, to be posted."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

from ..catalog import CATALOG
from ..defects.catalog import releases_with, removed_by, remover_of
from ..defects.declare import Defect, address_of, each
from ..defects.probe import is_there
from ..engine import PatchError
from ..engine.source import find_file
from ..megatrons.environment import find_version
from ..megatrons.installed import describe_megatron, find_releases
from ..megatrons.known import MAIN
from ..reproductions import needs, runner
from . import CANNOT_RUN
from .reproduce import describe_machine, find_programs, run_both, standalone_text


def print_report(identifier: str) -> int:
    """Run the program of a defect, and print the issue; 125 if the program cannot run here.

    Raises:
        UsageError: there is no such defect, or a CPU cannot show it.
        PatchError: there is no Megatron, no rehearsal with this torch, or the defect is not in this Megatron.
    """
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    ((defect, program),) = find_programs(identifier).items()
    if missing := needs.find_missing(program):
        print(f"{defect.id} cannot be shown here: {missing}", file=sys.stderr)
        return CANNOT_RUN
    runner.prepare()
    outcome = run_both(defect, program, missing)
    if outcome["has defect"] is False or outcome["as it is"]["right"]:
        releases = ", ".join(releases_with(defect))
        raise PatchError(f"{describe_megatron()} does not show {defect.id}; these have it: {releases}")
    print(make_report(defect, program, outcome))
    print("The script in this report was not run on a GPU. Run it before you post it.", file=sys.stderr)
    return 0


def make_report(defect: Defect, program: ModuleType, outcome: dict[str, Any]) -> str:
    """The text of the issue; `outcome` is what the program has seen."""
    parts = [
        *_say_what_is_assumed(program),
        *_say_what_upstream_knows(defect),
        f"# [BUG] {_title(defect)}",
        "**Describe the bug**",
        _explain(defect),
        "\n".join(f"* {name}: {text}" for name, text in _find_places(defect).items()),
        "**Steps/Code to reproduce bug**",
        f"Save the script below as `repro.py`, and run `python repro.py`. {describe_machine(program)}",
        _show_numbers(defect, outcome),
        "**Expected behavior**",
        f"{' '.join((program.__doc__ or '').split())} The right result is {outcome['expected']}.",
        "**Additional context**",
        *_describe_ways_out(defect, outcome),
    ]
    script = f"<details><summary>repro.py</summary>\n\n```python\n{standalone_text(defect, program)}```\n\n</details>"
    return mark_flags("\n\n".join(parts)) + f"\n\n{script}"


def _title(defect: Defect) -> str:
    return defect.effect.partition(", because")[0]


def mark_flags(text: str) -> str:
    """The flags as code."""
    return re.sub(r"(?<![\w`])--[a-zA-Z][\w-]*", r"`\g<0>`", text)


def _say_what_is_assumed(program: ModuleType) -> list[str]:
    """A comment that GitHub does not show, where what was seen follows from an assumption about a kernel."""
    if not (assumed := needs.assumption_of(program)):
        return []
    return [
        f"<!-- What the script has shown here follows from an assumption: {assumed}. In place of that kernel "
        f"something else ran that behaves so. Show the defect with the real kernel before you post this. -->"
    ]


def _say_what_upstream_knows(defect: Defect) -> list[str]:
    """A comment that GitHub does not show, for the person who posts the text."""
    links = ", ".join(map(address_of, defect.links))
    if defect.is_fixed:
        return [f"<!-- Upstream: {defect.state}. {links or 'There is nothing to report'}. -->"]
    return [f"<!-- Already reported: {links}. Post this as a comment there, if it adds something. -->"] if links else []


def _explain(defect: Defect) -> str:
    """What goes wrong; as far as possible in the words of the patch that removes it.

    Those of a repair that removes several defects are about all of them. Those of a feature are about what it is for.
    """
    patch = remover_of(defect, CATALOG)
    if patch and removed_by(patch) == [defect]:
        return patch.problem
    effect = f"{defect.effect}."
    if not (patch and patch.is_repair):
        return effect
    background = f"Background, about this and related defects: {patch.problem}"
    return background if effect.startswith(f"{_title(defect)}.") else f"{effect}\n\n{background}"


def _find_places(defect: Defect) -> dict[str, str]:
    """Where it is in Megatron's source, which runs it affects, and which Megatrons have it."""
    here = [sign.target for sign in each(defect.signs) if is_there(sign)]
    names = {"main": f"main ({MAIN})"}
    releases = ", ".join(names.get(release, release) for release in releases_with(defect))
    return {
        "Code": ", ".join(map(_name_code, dict.fromkeys(here))),
        "Affected runs": defect.condition,
        "Affected versions": f"megatron-core {releases}",
    }


def _name_code(target: str) -> str:
    """A file in Megatron's source, and the name in it."""
    module, _, name = target.partition(":")
    file = find_file(module)
    path = module.replace(".", "/") + ("/__init__.py" if file and file.name == "__init__.py" else ".py")
    return f"`{path}`" + (f" (`{name}`)" if name else "")


def _show_numbers(defect: Defect, outcome: dict[str, Any]) -> str:
    """What was seen, and where."""
    megatron, torch = " or ".join(sorted(find_releases())), find_version("torch", "torch")
    rows = {"expected": outcome["expected"], "seen": outcome["as it is"]["seen"]}
    if _is_removed(defect, outcome):
        rows["with the patch"] = outcome["with the patches"]["seen"]
    width = max(map(len, rows))
    return "\n".join(
        [
            "```text",
            *(f"{name:<{width}}  {value}" for name, value in rows.items()),
            "```",
            "",
            f"These values are from megatron-core {megatron} and torch {torch} on a CPU, where gloo and stand-ins take "
            "the place of NCCL and of what runs on a GPU. Megatron's code is unchanged.",
        ]
    )


def _describe_ways_out(defect: Defect, outcome: dict[str, Any]) -> list[str]:
    """The fix in words, and what a user can do without it."""
    patch = remover_of(defect, CATALOG)
    parts = []
    if patch and _is_removed(defect, outcome):
        fix = f": {patch.summary}." if patch.is_repair else "."
        parts.append(f"megatron-mtp-patches has a patch that removes it, `{patch.id}`{fix}")
        parts.append("\n".join(f"* {text}" for text in patch.adds if patch.is_repair))
    parts.append(f"Until it is fixed: {defect.advice}." if defect.advice else "No setting avoids it.")
    return list(filter(None, parts))


def _is_removed(defect: Defect, outcome: dict[str, Any]) -> bool:
    return bool(defect.patch) and outcome["with the patches"]["right"]
