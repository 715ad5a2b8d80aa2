"""The trainings that a launch script starts, with the variables that it sets to strings or arrays, as bash has them.

Nothing is executed. Assignments are taken from top to bottom, in every branch of a condition; `$(command)` and what
bash can do with a value (`${NAME%suffix}`) stay as they are.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..engine import UsageError
from .arithmetic import calculate

_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
_PARAMETER = re.compile(rf"\$\{{[^}}]*\}}|\$[A-Za-z_]\w*|\$[\d@*#?!]|{_SUBSTITUTION}")
_PIECE = re.compile(
    rf"""(?P<single>'[^']*') | (?P<double>"(?:\\.|[^"\\])*") | (?P<parameter>{_PARAMETER.pattern})
    | \\(?P<escaped>.) | (?P<plain>[^\s;&|()<>'"\\`])""",
    re.DOTALL | re.VERBOSE,
)
_TOKEN = re.compile(
    rf"""(?P<gap>(?:[\ \t\r]|\\\n)+) | (?P<comment>\#[^\n]*) | (?P<redirection>\d*(?:<+|>+)(?:&\d)?|&>+)
    | (?P<word>(?:{re.sub("[?]P<[a-z]+>", "?:", _PIECE.pattern)})+) | (?P<mark>.)""",
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(rf"(?:{_PARAMETER.pattern}|\S)+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_POSITIONAL = re.compile(r"\$\{?[\d@*]")
_VALUE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*)|:?\?[^}]*)?\}?")
_ARITHMETIC = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)
_PREFIXES = {"export", "readonly", "local", "declare", "if", "then", "elif", "else", "do", "exec", "time"}
_OPENING, _CLOSING = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}


class Command(NamedTuple):
    """A training that a script starts, or the words of a text that starts none.

    Attributes:
        script: the name of the Python file; '' where there is none.
        launcher: the words before it, torchrun and its options.
        flags: the words after it.
        conditional: the variables that the script sets under conditions or in loops.
        variables: those that it sets to strings, and those before the launcher.
    """

    script: str
    launcher: list[str]
    flags: list[str]
    conditional: list[str]
    variables: Mapping[str, str] = {}

    def hints(self, is_sized: bool, has_patches: bool) -> Iterator[str]:
        """Say what the script leaves open, and what to do.

        The number of its ranks is known if `is_sized`, and that it loads the patches if `has_patches`.
        """
        options = self._torchrun_options()
        if options and not is_sized:
            unknown = ", ".join(f"{name} {value}" for name, value in options.items() if not value.isdecimal())
            cause = f"options are not known as numbers ({unknown})" if unknown else "--nproc-per-node is absent"
            yield f"torchrun's {cause}: give --world-size N"
        if self.script and not has_patches:
            yield (
                f"nothing here shows that this run has the patches: start {self.script} by -m megatron_mtp_patches "
                f"run, import megatron_mtp_patches in it, or `megatron-mtp-patches enable` and set MEGATRON_MTP_PATCHES"
            )
        left = self.parameters_left()
        if unset := [name for name in left if not _POSITIONAL.match(name)]:
            yield (
                f"not set in this file: {' '.join(unset)}. Set such a variable in the environment of this command, or "
                f"write its value into the file"
            )
        if positional := [name for name in left if _POSITIONAL.match(name)]:
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
        """The parameters in its words that nothing sets; of a variable `$NAME`, whatever is done with its value."""
        parameters = (one for word in self.flags for one in _PARAMETER.findall(word))
        return list(dict.fromkeys(_VALUE.sub(r"$\1", one) if _VALUE.fullmatch(one) else one for one in parameters))


def read_commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands of a script that name a Python file and give it flags; else one command of all words.

    Only a text without `#!` may be such words. Where it has no variable either, as flags that were copied, `|` is part
    of a word.

    Args:
        environment: the variables that the script inherits.

    Raises:
        UsageError: a quotation does not end, or a script starts no training.
    """
    reader = _Reader(environment)
    commands = list(reader.read(text))
    conditional = list(reader.conditional)
    trainings = [
        Command(words[i], words[:i], words[i + 1 :], conditional, variables)
        for words, variables in commands
        for i in [next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))]
        if any(word.startswith("-") or _POSITIONAL.match(word) for word in words[i + 1 :])
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


class _Reader:
    """Reads statements, and keeps the variables that they set."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._values: dict[str, str | list[str]] = dict(environment)
        self._depth = 0  # of conditions and loops
        self.conditional: dict[str, None] = {}

    def read(self, text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
        """The words of each command, expanded, and the strings that the script has set before."""
        for words, arrays in _statements(text):
            self._depth += (words[:1] or [""])[0] in _OPENING
            self._depth -= (words[:1] or [""])[0] in _CLOSING
            while words and words[0] in _PREFIXES:
                words = words[1:]
            while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
                name, is_added, value = assignment.groups()
                if self._depth:
                    self.conditional[name] = None
                self._assign(name, is_added, value, arrays.get(words[0]))
                words = words[1:]
            expanded = [word for raw in words for word in self._expand(raw)]
            in_one_word = [
                word for word in expanded if re.search(r"\.py\s.*\s-|^\s*--?\w\S*\s+\S.*\s-", word, re.DOTALL)
            ]
            strings = {name: text for name, text in self._values.items() if isinstance(text, str)}
            yield [word for word in expanded if word not in in_one_word], strings
            for word in in_one_word:  # bash -c "torchrun pretrain_gpt.py --num-layers 4 ..."
                yield from self.read(word)

    def _assign(self, name: str, is_added: str, value: str, array: list[str] | None) -> None:
        old = self._values.get(name, "")
        if array is not None:
            kept = (old if isinstance(old, list) else [old] * bool(old)) if is_added else []
            self._values[name] = kept + [word for raw in array for word in self._expand(raw)]
        else:
            text = " ".join(self._expand(value))
            self._values[name] = f"{' '.join(old) if isinstance(old, list) else old}{text}" if is_added else text

    def _expand(self, raw: str) -> list[str]:
        """The words that a word becomes."""
        words = [""]
        is_quoted = False
        for piece in _PIECE.finditer(raw):
            if piece["parameter"]:
                self._append(words, self._value(piece["parameter"], splits=True))
            elif piece["double"]:
                is_quoted = True
                inner, end = piece["double"][1:-1], 0
                for parameter in _PARAMETER.finditer(inner):
                    words[-1] += _unescape(inner[end : parameter.start()])
                    self._append(words, self._value(parameter[0], splits=False))
                    end = parameter.end()
                words[-1] += _unescape(inner[end:])
            elif piece["single"]:
                is_quoted = True
                words[-1] += piece["single"][1:-1]
            else:
                words[-1] += (piece["escaped"] or "").replace("\n", "") + (piece["plain"] or "")
        return words if is_quoted else [word for word in words if word]

    @staticmethod
    def _append(words: list[str], more: list[str]) -> None:
        """Add words to the last one of which the first is to belong."""
        if more:
            words[-1] += more[0]
            words += more[1:]

    def _value(self, parameter: str, splits: bool) -> list[str]:
        """The words of a parameter; itself where nothing sets it, or where bash would have to be asked."""
        if arithmetic := _ARITHMETIC.fullmatch(parameter):
            text = _PARAMETER.sub(lambda inner: "".join(self._value(inner[0], splits=False)), arithmetic[1])
            result = calculate(text, {name: one for name, one in self._values.items() if isinstance(one, str)})
            return [parameter if result is None else str(result)]
        match = _VALUE.fullmatch(parameter)
        if match is None:
            return [parameter]
        value = self._values.get(match[1])
        if value is None and match["default"] is None:
            return [parameter]
        if value is None:
            value = " ".join(self._expand(match["default"]))
        if isinstance(value, str):
            value = [value]
        elif "[" not in parameter:
            value = value[:1]
        return [word for text in value for word in _WORD.findall(text)] if splits else value


def _statements(text: str) -> Iterator[tuple[list[str], dict[str, list[str]]]]:
    """The words of each statement as they are written, and for each `NAME=` in it that starts an array its words."""
    words: list[str] = []
    arrays: dict[str, list[str]] = {}
    array: list[str] | None = None
    before, skips = "", False
    for token in _TOKEN.finditer(text):
        kind, written = str(token.lastgroup), token[0]
        if kind == "word" and skips:  # the file of a redirection
            skips = False
        elif kind == "word":
            (words if array is None else array).append(written)
        elif kind == "redirection":
            skips = "&" not in written[1:]
        elif written == "(" and array is None and words and before == words[-1] and _ASSIGNMENT.fullmatch(before):
            array = arrays[before] = []
        elif written == ")" and array is not None:
            array = None
        elif kind == "mark" and array is None:
            yield words, arrays
            words, arrays = [], {}
        before = written
    yield words, arrays


def _unescape(text: str) -> str:
    """Return the value of a text in double quotes."""
    return re.sub(r'\\([\\"$`\n])', lambda match: match[1].strip("\n"), text)
