"""A Python for each release, as scripts and the GPU lane are given them."""

from __future__ import annotations

import argparse

REFERENCE = "0.19.2"  # what the other releases are held against


def release_and_python(text: str) -> tuple[str, str]:
    """The type of --python."""
    release, equals, python = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not RELEASE=PYTHON")
    return release, python
