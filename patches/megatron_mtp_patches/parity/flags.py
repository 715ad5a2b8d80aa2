"""The flags of a run as pairs of a name and its values."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NamedTuple


class Flag(NamedTuple):
    """A flag and its values, as a user wrote them."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """The name without dashes in front, with underscores."""
        return self.name.lstrip("-").replace("-", "_")

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


def split(words: Iterable[str]) -> list[Flag]:
    """The flags of a command line; what stands before the first one is left out."""
    flags: list[Flag] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append(Flag(name, (value,) if equals else ()))
        elif flags:
            flags[-1] = Flag(flags[-1].name, (*flags[-1].values, word))
    return flags


def join(flags: Iterable[Flag]) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(word for flag in flags for word in (flag.name, *flag.values))


def read_settings(flags: Iterable[Flag]) -> argparse.Namespace:
    """The settings as Megatron's parser reads them, before it checks how they fit."""
    from megatron.training.arguments import add_megatron_arguments

    from ..doctor.flags import refusals

    with refusals():
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        return parser.parse_known_args(join(flags))[0]
