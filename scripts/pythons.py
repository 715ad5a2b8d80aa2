"""Arguments that scripts and the GPU lane share: a Python for each release, numbers of ranks."""

from __future__ import annotations

import argparse
import shutil

REFERENCE = "0.19.2"  # what the other releases are held against


def release_and_python(text: str) -> tuple[str, str]:
    """The type of --python."""
    release, equals, python = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not RELEASE=PYTHON")
    return release, executable(python)


def executable(text: str) -> str:
    """The type of a Python whose release is not asked for."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text}: no such Python")
    return text


def positive(text: str) -> int:
    """The type of a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def numbers(text: str) -> list[int]:
    """The type of --ranks: 1,2,4."""
    return [positive(word) for word in text.split(",")]
