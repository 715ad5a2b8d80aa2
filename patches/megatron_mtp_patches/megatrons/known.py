"""The Megatrons that the patches are made for. megatrons.json is the one list of them; noxfile.py reads it by path.

For a release it has: the tag of its sources (the newest one that exists), the oldest Python that it accepts, and the
TransformerEngine that its pyproject.toml pins. `reference` is the release that the others are compared with, `default`
the one that runs what runs on one release, `main` the commit of upstream's main whose sources are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LIST: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("megatrons.json").read_text(encoding="utf-8"))

MEGATRONS: list[dict[str, str]] = _LIST["megatrons"]
RELEASES: tuple[str, ...] = tuple(one["version"] for one in MEGATRONS)
REFERENCE: str = _LIST["reference"]
DEFAULT: str = _LIST["default"]
MAIN: str = _LIST["main"]
VERSIONS = (*RELEASES, "main")  # from the oldest to the newest
# The TransformerEngine that each release was made for.
TRANSFORMER_ENGINE = {one["version"]: one["transformer_engine"] for one in MEGATRONS}
# {name in the tables of upstream's tests: git ref}; those are named by the tag, which 0.19.2 shares with 0.19.0.
REFS = {**{one["tag"].removeprefix("core_v"): one["tag"] for one in MEGATRONS}, "main": "main"}


def since(version: str) -> tuple[str, ...]:
    """Return the releases from `version` ("0.18", "main") on, and main."""
    releases = () if version == "main" else RELEASES
    return (*(release for release in releases if _numbers(release) >= _numbers(version)), "main")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
