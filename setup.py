"""Everything about the package is in setup.cfg, except the text for a package index, which is made from README."""

import re
from pathlib import Path

from setuptools import setup

RELATIVE_LINK = re.compile(r"\[([^]]+)\]\((?!https?://)[^)]*\)")
IMAGE_AND_CAPTION = re.compile(r"^!\[.*?\n\n", re.MULTILINE | re.DOTALL)


def description(readme: str) -> str:
    """README without what an index cannot show: images, and links to other files."""
    text = RELATIVE_LINK.sub(r"\1", IMAGE_AND_CAPTION.sub("", readme))
    return f"{text}\nThe pages that this text names are in docs/ of the source distribution.\n"


setup(
    long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
