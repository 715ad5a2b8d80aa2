"""What a configuration is drawn from: the features of ci/parity/features.toml, which says how they are chosen."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from scripts.common.toml import read_toml

FILE = Path(__file__).resolve().parents[2] / "ci" / "parity" / "features.toml"


class Feature(NamedTuple):
    """A choice of a user.

    Attributes:
        name: of this choice.
        flags: as a user of pretrain_gpt.py gives them.
        needs: of each of these sets of names, a configuration has one.
        without: names that it does not have.
        weight: how often it is drawn, relative to the others of its slot.
    """

    name: str
    flags: tuple[str, ...]
    needs: tuple[frozenset[str], ...]
    without: frozenset[str]
    weight: float


class Slot(NamedTuple):
    """Features of which a configuration has one, or none.

    Attributes:
        probability: that it has one.
        is_axis: it is an axis of the layout.
        features: in the order in which a plain run prefers them.
    """

    probability: float
    is_axis: bool
    features: tuple[Feature, ...]


def read_slots() -> list[Slot]:
    table = read_toml(FILE)
    groups: dict[str, str] = table["groups"]

    def names(words: str) -> list[str]:
        """Of "a|b", where a name of a group stands for those of its features."""
        return [one for name in words.split("|") for one in groups.get(name, name).split("|") if one]

    def feature(row: dict[str, str]) -> Feature:
        needs = tuple(frozenset(names(words)) for words in row.get("needs", "").split())
        flags = tuple(row.get("flags", "").split())
        return Feature(row["name"], flags, needs, frozenset(names(row.get("without", ""))), float(row.get("weight", 1)))

    return [
        Slot(slot["probability"], slot.get("is_axis", False), tuple(map(feature, slot["features"])))
        for slot in table["slot"]
    ]


def unknown_features(slots: list[Slot], parser: argparse.ArgumentParser) -> set[str]:
    """The names of the features whose flags this Megatron's parser does not take."""
    return {one.name for slot in slots for one in slot.features if not _takes(parser, one.flags)}


def _takes(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return not parser.parse_known_args(words)[1]
    return False
