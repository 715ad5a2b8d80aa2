"""Answers questions about source files. Each file is read and hashed once, and parsed at most once.

A file is parsed only if its bytes are not those of a known file, whose answers the table of fingerprints holds. Of the
tree only the answers are kept, until the file changes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .declare import Patch
from .source import find_file, parse_bytes
from .source_questions import Answer, Question, answer, questions_about

_answers_by_hash: dict[str, dict[str, Answer]] = {}  # by the hash of the file's bytes
_expected: dict[str, set[Question]] = {}  # by module: what will be asked of it


@dataclass(frozen=True)
class _FileAnswers:
    """What is known of one file.

    Attributes:
        stamp: the time of its last change and its size: with another stamp it is another file.
        answers: by the question as text.
    """

    stamp: tuple[int, int]
    answers: dict[str, Answer]


_answers_by_file: dict[Path, _FileAnswers] = {}


def expect_questions(patches: Iterable[Patch]) -> None:
    """From now on a file that has to be parsed answers all that these patches ask of it, so it is parsed once."""
    for module, questions in questions_about(patches).items():
        _expected.setdefault(module, set()).update(questions)


def learn_known_files(files: Mapping[str, Mapping[str, Mapping[str, Answer]]]) -> None:
    """`files`: {module: {hash of the file's bytes: {question: answer}}}, of fingerprints.json."""
    for by_hash in files.values():
        for digest, answers in by_hash.items():
            _answers_by_hash.setdefault(digest, {}).update(answers)


def ask(module: str, question: Question, path: list[str] | None = None) -> Answer | None:
    """The answer of the source of `module`, or None where it has no source here; `path` as in `find_file`.

    Raises:
        PatchError: the source does not parse.
    """
    file = find_file(module, path)
    if file is None:
        return None
    cached = _answers_by_file.get(file)
    if cached is None or cached.stamp != _stamp(file.stat()) or str(question) not in cached.answers:
        cached = _answers_by_file[file] = _read(file, module, question, cached)
    return cached.answers[str(question)]


def hash_bytes(source: bytes) -> str:
    """What a known file is recognised by."""
    return hashlib.sha256(source).hexdigest()


def _read(file: Path, module: str, question: Question, before: _FileAnswers | None) -> _FileAnswers:
    """What is known with an answer to `question`; what is known `before` is kept if the file is the same."""
    with file.open("rb") as stream:
        stamp = _stamp(os.fstat(stream.fileno()))
        source = stream.read()
    if before is not None and before.stamp == stamp:
        answers = before.answers
    else:
        answers = _answers_by_hash.get(hash_bytes(source), {})
    if str(question) not in answers:
        missing = [one for one in {question, *_expected.get(module, ())} if str(one) not in answers]
        answers = answers | answer(parse_bytes(source, file), missing)
    return _FileAnswers(stamp, answers)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size
