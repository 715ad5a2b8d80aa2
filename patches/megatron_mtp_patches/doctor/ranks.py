"""The number of ranks on which torchrun or Slurm starts a training, by their options."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from pathlib import PurePath

_TORCHRUN = ("--nproc-per-node", "--nnodes")
_SLURM = ("--ntasks", "--nodes", "--ntasks-per-node")
_LONG = {"-n": "--ntasks", "-N": "--nodes"}


def torchrun_options(launcher: Iterable[str]) -> dict[str, str]:
    """The options of torchrun in a launcher that say on how many ranks it starts the script."""
    words = [part for word in launcher for part in word.split("=", 1)]
    options = {word.replace("_", "-"): value for word, value in pairwise(words)}
    return {name: options[name] for name in _TORCHRUN if name in options}


def torchrun_ranks(options: dict[str, str]) -> int | None:
    """The number of ranks that torchrun starts; None where these options are no numbers, or the main one is absent."""
    if "--nproc-per-node" not in options or not all(map(str.isdecimal, options.values())):
        return None
    return math.prod(map(int, options.values()))


def is_torchrun(launcher: Iterable[str]) -> bool:
    return any(PurePath(word).name == "torchrun" or word.startswith("torch.distributed.") for word in launcher)


def sbatch_options(text: str) -> dict[str, str] | None:
    """The options that say on how many ranks a job starts, of the #SBATCH lines before the first command.

    None if there is no such line.
    """
    head = takewhile(lambda line: line.startswith("#") or not line.strip(), text.splitlines())
    lines = [line.partition(" #")[0].split()[1:] for line in head if re.match(r"#SBATCH\s", line)]
    return {name: value for words in lines for name, value in _slurm_options(words).items()} if lines else None


def srun_options(commands: Sequence[Sequence[str]], index: int, launcher: Sequence[str]) -> dict[str, str] | None:
    """The same of the srun in a launcher, or of the one whose `bash -c` has this command; None if there is none.

    Args:
        commands: the words of each command of the script.
        index: that of the command with this launcher.
    """
    outer = [words for words in commands[:index] if re.fullmatch(r"-\w*c", (words or [""])[-1])]
    for words in (launcher, *outer[-1:]):
        names = [PurePath(word).name for word in words]
        if "srun" in names:
            return _slurm_options(words[names.index("srun") + 1 :])
    return None


def _slurm_options(words: Sequence[str]) -> dict[str, str]:
    """The options of sbatch, or those of srun before the command that it starts."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        if not value and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        options[_LONG.get(name, name)] = value
    return {name: options[name] for name in _SLURM if name in options}


def slurm_ranks(options: dict[str, str]) -> int | None:
    """The number of ranks that srun starts; None where these options do not say it in numbers, or contradict."""
    numbers = {name: int(value) for name, value in options.items() if value.isdecimal()}
    if "--ntasks" in options and "--ntasks" not in numbers:
        return None
    counts = {numbers["--ntasks"]} if "--ntasks" in numbers else set()
    if "--nodes" in numbers and "--ntasks-per-node" in numbers:
        counts.add(numbers["--nodes"] * numbers["--ntasks-per-node"])
    return counts.pop() if len(counts) == 1 else None
