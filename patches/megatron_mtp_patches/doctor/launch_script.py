"""The trainings that a launch script starts, with the variables that it sets to strings or arrays, as bash has them.

bash.py reads the commands of the script. One that names a Python file and gives it flags is a training, and so is
`megatron sft` of ms-swift, in place of whose flags a file may be.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import NamedTuple

from ..engine import UsageError
from .bash import Reader, is_positional, parameters_in
from .ranks import is_torchrun, sbatch_options, slurm_ranks, srun_options, torchrun_options, torchrun_ranks

PACKAGE, COMMAND = "megatron_mtp_patches", "megatron-mtp-patches"
MS_SWIFT, MS_SWIFT_METHODS = "megatron", ("sft", "pt", "rlhf")  # the program that ms-swift installs; what it trains by


class Command(NamedTuple):
    """A training that a script starts, or the words of a text that starts none.

    Attributes:
        script: the name of the Python file, or of the program of ms-swift; '' where there is none.
        launcher: the words before it, torchrun and its options.
        flags: the words after it.
        conditional: the variables that the script sets under conditions or in loops.
        variables: those that it sets to strings, and those before the launcher.
        sourced: the files that the script has bash read (`source cluster.env`), which are not read here.
        srun: the options of srun and #SBATCH that say on how many ranks srun starts it; None where srun does not.
        is_slurm_job: srun starts it, or the script has #SBATCH lines.
    """

    script: str
    launcher: list[str]
    flags: list[str]
    conditional: list[str]
    variables: Mapping[str, str] = {}
    sourced: Sequence[str] = ()
    srun: dict[str, str] | None = None
    is_slurm_job: bool = False

    @property
    def settings(self) -> SimpleNamespace:
        """What a predicate may ask of the command beside its flags: the name of the Python file."""
        return SimpleNamespace(script=Path(self.script).name or None)

    def hints(self, is_sized: bool, loads_patches: bool | None, chooses_patches: bool) -> Iterator[str]:
        """Say what the script leaves open, and what to do.

        Args:
            is_sized: the number of its ranks is known.
            loads_patches: it loads the patches; None where its Python file cannot be read.
            chooses_patches: it sets MEGATRON_MTP_PATCHES, which is believed where the Python file cannot be read.
        """
        options = torchrun_options(self.launcher)
        if options and not is_sized:
            unknown = ", ".join(f"{name} {value}" for name, value in options.items() if not value.isdecimal())
            cause = f"options are not known as numbers ({unknown})" if unknown else "--nproc-per-node is absent"
            yield f"torchrun's {cause}: give --world-size N"
        elif self.is_slurm_job and not is_sized:
            yield (
                "the number of ranks that Slurm starts is not known: give --world-size N, or give srun or #SBATCH "
                "numbers as --ntasks, or as --nodes and --ntasks-per-node"
            )
        yield from self.hints_on_patches(loads_patches, chooses_patches)
        yield from self.hints_on_script()

    def hints_on_patches(self, loads_patches: bool | None, chooses_patches: bool) -> Iterator[str]:
        """Say whether the run has the patches, and what to do, with the arguments of `hints`."""
        start = f"start {self.script} by -m megatron_mtp_patches run, or import megatron_mtp_patches in it"
        if not self.script or loads_patches:
            pass
        elif loads_patches is False and chooses_patches:
            yield (
                f"MEGATRON_MTP_PATCHES loads no patch: {self.script} does not import megatron_mtp_patches, and "
                f"`megatron-mtp-patches enable` has not been called in this environment. Call it, or {start}"
            )
        elif loads_patches is False:
            yield (
                f"nothing here shows that this run has the patches: {start}; or call `megatron-mtp-patches enable` "
                f"in this environment and set MEGATRON_MTP_PATCHES=all in this file"
            )
        elif chooses_patches:
            yield (
                f"the patches that MEGATRON_MTP_PATCHES chooses count as those of the run: they act only where "
                f"{self.script} imports megatron_mtp_patches, or after `megatron-mtp-patches enable`"
            )
        else:
            yield (
                f"nothing here shows that this run has the patches: {start}. Where it does so already, or after "
                f"`megatron-mtp-patches enable`, set MEGATRON_MTP_PATCHES=all in this file"
            )

    def hints_on_script(self) -> Iterator[str]:
        """Say what of the script is not read or not known."""
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

    def world_size(self) -> int | None:
        """The number of ranks that torchrun or srun starts; None where their options do not say it in numbers."""
        if options := torchrun_options(self.launcher):
            return torchrun_ranks(options)
        return None if is_torchrun(self.launcher) else slurm_ranks(self.srun or {})

    def loads_patches(self, folder: Path) -> bool | None:
        """True if the script is started by `run` of the patches, or imports them; None if it cannot be read.

        `folder` is that of the launch script. What the script imports is not read.
        """
        for first, second in pairwise(self.launcher):
            if first in ("-m", "--module") and second == PACKAGE:
                return True
            if PurePath(first).name == COMMAND and second == "run":
                return True
        files = dict.fromkeys(place / self.script for place in (folder, Path.cwd()))
        answers = [_imports_patches(file) for file in files if file.is_file()]
        return True if True in answers else None if None in answers or not answers else False

    def parameters_left(self) -> list[str]:
        """The parameters in its words that nothing sets."""
        return parameters_in(self.flags)


def _imports_patches(file: Path) -> bool | None:
    """True if a Python file has an import of the patches; None if it cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return None
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return any(module.partition(".")[0] == PACKAGE for module in modules)


def read_commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands of a script that start a training; else one command of all words.

    Only a text without `#!` may be such words. Where it has no variable either, as flags that were copied, `|` is part
    of a word.

    Args:
        environment: the variables that the script inherits.

    Raises:
        UsageError: a quotation does not end, a script starts no training, or the text has no flags.
    """
    reader = Reader(environment)
    commands = list(reader.read(text))
    conditional = list(reader.conditional)
    sourced = list(dict.fromkeys(_sourced_files(words for words, _ in commands)))
    sbatch = sbatch_options(text)
    trainings = []
    for index, (words, variables) in enumerate(commands):
        i = _index_of_program(words)
        if not (
            _is_of_ms_swift(words, i) or any(word.startswith("-") or is_positional(word) for word in words[i + 1 :])
        ):
            continue
        srun = srun_options([one for one, _ in commands], index, words[:i])
        srun = None if srun is None else {**(sbatch or {}), **srun}
        is_slurm_job = srun is not None or sbatch is not None
        trainings.append(
            Command(words[i], words[:i], words[i + 1 :], conditional, variables, sourced, srun, is_slurm_job)
        )
    by_flags = {tuple(one.flags): one for one in trainings}  # branches of a condition may start the same
    if by_flags:
        return list(by_flags.values())
    words = [word for words, _ in commands for word in words]
    if not words or not (text.startswith("#!") or any(word.startswith("-") or "$" in word for word in words)):
        raise UsageError("no run in this file: it has neither a command that starts a training nor flags")
    if text.startswith("#!"):
        raise UsageError(
            "no command of this script has a Python file and flags, or is `megatron sft`, `pt` or `rlhf` of ms-swift: "
            "name the script that starts the training"
        )
    if "$" in text:
        return [Command("", [], words, conditional)]
    try:
        return [Command("", [], shlex.split(text.replace("\\\n", " "), comments=True), [])]
    except ValueError as error:
        raise UsageError(f"it cannot be read: {error}") from error


def _index_of_program(words: list[str]) -> int:
    """The index of the Python file, or of ms-swift's program, in a command; the number of words if it has none."""
    return next((i for i, word in enumerate(words) if word.endswith(".py") or _is_of_ms_swift(words, i)), len(words))


def _is_of_ms_swift(words: list[str], i: int) -> bool:
    """True if the word at this index is ms-swift's program, which trains."""
    program, *rest = words[i : i + 2] or [""]
    return PurePath(program).name == MS_SWIFT and bool(set(rest) & set(MS_SWIFT_METHODS))


def _sourced_files(commands: Iterable[list[str]]) -> Iterator[str]:
    """The files that `source` or `.` has bash read, without the `activate` of a Python environment."""
    for words in commands:
        if len(words) > 1 and words[0] in ("source", ".") and PurePath(words[1]).name != "activate":
            yield words[1]
