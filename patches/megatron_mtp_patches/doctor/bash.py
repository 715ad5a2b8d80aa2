"""Read the commands of a bash script without running any, with the variables that the script sets.

Each stage is a function. In a script that has set N=4 they make of `A=(--a "$N x")` and `train.py ${A[@]}`:

    _statements   the words as they are written   ["A="] with the array ["--a", '"$N x"']; ["train.py", "${A[@]}"]
    read          assignments and commands        A is set to ["--a", "4 x"]; ["train.py", "--a", "4", "x"]
    _expand       the words of a written word     '"$N x"' is ["4 x"]
    _value        the words of a parameter        ${A[@]} is ["--a", "4", "x"]; $((2 * N)) is ["8"]; $(date) is itself

Assignments are taken from top to bottom, in every branch of a condition; `$(command)` and what bash can do with a value
(`${NAME%suffix}`) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from .arithmetic import calculate

_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"  # $(date), $((2 * N)), `date`
_PARAMETER = re.compile(rf"\$\{{[^}}]*\}}|\$[A-Za-z_]\w*|\$[\d@*#?!]|{_SUBSTITUTION}")  # also ${A[@]}, $N, $1
# A part of a word: 'x', "x $N", ${A[@]}, \x or a single character.
_PIECE = re.compile(
    rf"""(?P<single>'[^']*') | (?P<double>"(?:\\.|[^"\\])*") | (?P<parameter>{_PARAMETER.pattern})
    | \\(?P<escaped>.) | (?P<plain>[^\s;&|()<>'"\\`])""",
    re.DOTALL | re.VERBOSE,
)
# A part of a script. The names of the groups of _PIECE are left out, because a word has many pieces.
_TOKEN = re.compile(
    rf"""(?P<gap>(?:[\ \t\r]|\\\n)+) | (?P<comment>\#[^\n]*) | (?P<redirection>\d*(?:<+|>+)(?:&\d)?|&>+)
    | (?P<word>(?:{re.sub("[?]P<[a-z]+>", "?:", _PIECE.pattern)})+) | (?P<mark>.)""",
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(rf"(?:{_PARAMETER.pattern}|\S)+")  # of a value without quotes, which bash splits at spaces
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)  # N=4, N+=4
_POSITIONAL = re.compile(r"\$\{?[\d@*]")  # $1, $@, ${@:2}
# $N, ${N}, ${A[@]}, ${N:-default}, ${N:?message}
_VALUE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*)|:?\?[^}]*)?\}?")
_ARITHMETIC = re.compile(r"\$\(\((.*)\)\)", re.DOTALL)  # $((2 * N))
# A command line in one word, as in bash -c "torchrun train.py --a 1", or its flags alone.
_COMMAND_LINE = re.compile(r"(?:\.py|\bmegatron)\s.*\s-|^\s*--?\w\S*\s+\S.*\s-", re.DOTALL)
_PREFIXES = {"export", "readonly", "local", "declare", "if", "then", "elif", "else", "do", "exec", "time"}
_OPENING, _CLOSING = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}


def is_positional(word: str) -> bool:
    """True if a word starts with an argument of the script, as "$1" and "${@:2}" do."""
    return bool(_POSITIONAL.match(word))


def parameters_in(words: Iterable[str]) -> list[str]:
    """The parameters in these words; of a variable `$NAME`, whatever is done with its value."""
    parameters = (one for word in words for one in _PARAMETER.findall(word))
    return list(dict.fromkeys(_VALUE.sub(r"$\1", one) if _VALUE.fullmatch(one) else one for one in parameters))


class Reader:
    """Read the commands of a script and keep the variables that it sets.

    Attributes:
        conditional: the variables that are set under conditions or in loops.
    """

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
            in_one_word = [word for word in expanded if _COMMAND_LINE.search(word)]
            strings = {name: text for name, text in self._values.items() if isinstance(text, str)}
            yield [word for word in expanded if word not in in_one_word], strings
            for word in in_one_word:
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
