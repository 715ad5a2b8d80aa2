"""Arguments that the command lines of the scripts have in common."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`; its help is the module's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {module}", description=doc, formatter_class=raw)


def add_pythons(parser: argparse.ArgumentParser) -> None:
    """Add --python RELEASE=PYTHON, which may be repeated: options.python is {release: path}."""
    parser.add_argument(
        "--python",
        type=release_and_python,
        action=_Collect,
        required=True,
        default={},
        metavar="RELEASE=PYTHON",
        help="a Python that has this release of megatron-core and what this project needs; may be repeated",
    )


def add_checkouts(parser: argparse.ArgumentParser) -> None:
    """Add --checkout RELEASE=FOLDER, which may be repeated: options.checkout is {release: path}."""
    parser.add_argument(
        "--checkout",
        type=release_and_checkout,
        action=_Collect,
        required=True,
        default={},
        metavar="RELEASE=FOLDER",
        help="a checkout of Megatron-LM with the sources of this release; may be repeated",
    )


class _Collect(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), values[0]: values[1]})


def release_and_python(text: str) -> tuple[str, str]:
    release, equals, python = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not RELEASE=PYTHON")
    if shutil.which(python) is None:
        raise argparse.ArgumentTypeError(f"{python}: no such Python")
    return release, python


def release_and_checkout(text: str) -> tuple[str, Path]:
    release, equals, folder = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not RELEASE=FOLDER")
    if not Path(folder, "pretrain_gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{folder}: no pretrain_gpt.py is there")
    return release, Path(folder).absolute()


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """The type of an argument that is one of these names."""
    choices = list(names)

    def check(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of: {'; '.join(choices)}")
        return text

    return check


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def numbers(text: str) -> list[int]:
    """The type of --ranks: 1,2,4."""
    return [positive(word) for word in text.split(",")]
