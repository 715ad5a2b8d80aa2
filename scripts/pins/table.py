"""The results of `python -m scripts.pins`, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.common.markdown import table
from scripts.docs.addresses import address

STATES = ("applied", "repaired", "native", "refused")
States = dict[str, Any]  # what scripts.pins writes of a framework


def make_page(pins: list[dict[str, Any]], record: list[States]) -> str:
    """The pins of ci/pins.toml, how many patches have each state there, and the sources that are not known."""
    by_framework = {row["framework"]: row for row in record}
    pairs = [(pin, by_framework[pin["framework"]]) for pin in pins if pin["framework"] in by_framework]
    parts = [
        table(["framework", "its Megatron", "where that stands", "nearest release", *STATES], map(_row, pairs)),
        ["Functions of unknown source, and the patches that are refused for them:"],
        [line for _, one in pairs for line in _unknown(one)] or ["none"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def by_patch(record: list[States], patches: Iterable[str]) -> str:
    """The state of each patch for each pin."""
    states = ([f"[`{patch}`]({address(patch)})", *(_state(one, patch) for one in record)] for patch in patches)
    return "\n".join(table(["patch", *(one["framework"] for one in record)], states))


def _row(pair: tuple[dict[str, Any], States]) -> list[object]:
    pin, row = pair
    commit, read = row["commit"], f"https://github.com/{pin['repository']}/blob/{pin['commit']}/{pin['file']}"
    name = "" if commit.startswith(pin["megatron"]) else f"{pin['megatron']}, "
    return [
        pin["framework"],
        f"{name}[{commit[:7]}](https://github.com/NVIDIA/Megatron-LM/commit/{commit})",
        f"[{pin['file']}]({read}) of {pin['commit'][:7]}, {pin['date']}",
        row["like"],
        *(list(row["states"].values()).count(state) for state in STATES),
    ]


def _state(row: States, patch: str) -> str:
    state = row["states"].get(patch, "not read")
    return f"**{state}**" if state == "refused" else str(state)


def _unknown(row: States) -> list[str]:
    """The functions of unknown source, and the patches that are refused for each."""
    name, unknown = row["framework"], sorted(row["unknown"].items())
    return [f"* {name}: `{target}`: {', '.join(patches)}" for target, patches in unknown]
