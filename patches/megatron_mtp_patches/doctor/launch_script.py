"""The trainings that a launch script starts, with the variables that it sets to strings or arrays, as bash has them.

bash.py reads the commands of the script; of these, one that names a Python file and gives it flags is a training.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import NamedTuple

from ..engine import UsageError
from .bash import Reader, is_positional, parameters_in


class Command(NamedTuple):
    """A training that a script starts, or the words of a text that starts none.

    Attributes:
        script: the name of the Python file; '' where there is none.
        launcher: the words before it, torchrun and its options.
        flags: the words after it.
        conditional: the variables that the script sets under conditions or in loops.
        variables: those that it sets to strings, and those before the launcher.
        sourced: the files that the script has bash read (`source cluster.env`), which are not read here.
    """

    script: str
    launcher: list[str]
    flags: list[str]
    conditional: list[str]
    variables: Mapping[str, str] = {}
    sourced: Sequence[str] = ()

    def hints(self, is_sized: bool, loads_patches: bool, chooses_patches: bool) -> Iterator[str]:
        """Say what the script leaves open, and what to do.

        Args:
            is_sized: the number of its ranks is known.
            loads_patches: it is known to load the patches.
            chooses_patches: it sets MEGATRON_MTP_PATCHES, which says that its run has them.
        """
        options = self._torchrun_options()
        if options and not is_sized:
            unknown = ", ".join(f"{name} {value}" for name, value in options.items() if not value.isdecimal())
            cause = f"options are not known as numbers ({unknown})" if unknown else "--nproc-per-node is absent"
            yield f"torchrun's {cause}: give --world-size N"
        if self.script and chooses_patches and not loads_patches:
            yield (
                f"the patches that MEGATRON_MTP_PATCHES chooses count as those of the run: they act only where "
                f"{self.script} imports megatron_mtp_patches, or after `megatron-mtp-patches enable`"
            )
        elif self.script and not loads_patches:
            yield (
                f"nothing here shows that this run has the patches: start {self.script} by -m megatron_mtp_patches "
                f"run, or import megatron_mtp_patches in it. Where it does so already, or after `megatron-mtp-patches "
                f"enable`, set MEGATRON_MTP_PATCHES=all in this file"
            )
        if self.sourced:
            yield (
                f"not read: {', '.join(self.sourced)}. Set what it sets in the environment of this command, or write "
                f"it into this file"
            )
        left = self.parameters_left()
        if unset := [name for name in left if not is_positional(name)]:
            yield (
                f"not set in this file: {' '.join(unset)}. Set such a variable in the environment of this command, or "
                f"write its value into the file"
            )
        if positional := [name for name in left if is_positional(name)]:
            yield f"not known: {' '.join(positional)}, with which the script is called. Write these flags into the file"
        if self.conditional:
            names = ", ".join(self.conditional)
            yield f"conditions are not evaluated: the last value that the file gives counts for {names}"

    def _torchrun_options(self) -> dict[str, str]:
        """The options of torchrun that say on how many ranks it starts the script."""
        words = [part for word in self.launcher for part in word.split("=", 1)]
        options = {word.replace("_", "-"): value for word, value in pairwise(words)}
        return {name: options[name] for name in ("--nproc-per-node", "--nnodes") if name in options}

    def world_size(self) -> int | None:
        """The number of ranks that torchrun starts; None where its options are no numbers, or there are none."""
        options = self._torchrun_options()
        if "--nproc-per-node" not in options or not all(map(str.isdecimal, options.values())):
            return None
        return math.prod(map(int, options.values()))

    def loads_patches(self, folder: Path) -> bool:
        """True if its launcher starts the script with the patches, or the script, if it is found, names them.

        `folder` is that of the launch script.
        """
        if any("megatron_mtp_patches" in word.replace("-", "_") for word in self.launcher):
            return True
        files = [place / self.script for place in (folder, Path.cwd())]
        return any("megatron_mtp_patches" in file.read_text("utf-8", "replace") for file in files if file.is_file())

    def parameters_left(self) -> list[str]:
        """The parameters in its words that nothing sets."""
        return parameters_in(self.flags)


def read_commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands of a script that name a Python file and give it flags; else one command of all words.

    Only a text without `#!` may be such words. Where it has no variable either, as flags that were copied, `|` is part
    of a word.

    Args:
        environment: the variables that the script inherits.

    Raises:
        UsageError: a quotation does not end, or a script starts no training.
    """
    reader = Reader(environment)
    commands = list(reader.read(text))
    conditional = list(reader.conditional)
    sourced = list(dict.fromkeys(_sourced_files(words for words, _ in commands)))
    trainings = [
        Command(words[i], words[:i], words[i + 1 :], conditional, variables, sourced)
        for words, variables in commands
        for i in [next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))]
        if any(word.startswith("-") or is_positional(word) for word in words[i + 1 :])
    ]
    by_flags = {tuple(one.flags): one for one in trainings}  # branches of a condition may start the same
    if by_flags:
        return list(by_flags.values())
    if text.startswith("#!"):
        raise UsageError(
            "no command of this script has a Python file and flags: name the script that starts the training"
        )
    if "$" in text:
        return [Command("", [], [word for words, _ in commands for word in words], conditional)]
    try:
        return [Command("", [], shlex.split(text.replace("\\\n", " "), comments=True), [])]
    except ValueError as error:
        raise UsageError(f"it cannot be read: {error}") from error


def _sourced_files(commands: Iterable[list[str]]) -> Iterator[str]:
    """The files that `source` or `.` has bash read, without the `activate` of a Python environment."""
    for words in commands:
        if len(words) > 1 and words[0] in ("source", ".") and PurePath(words[1]).name != "activate":
            yield words[1]
