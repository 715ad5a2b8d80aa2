"""Everything about the package is in setup.cfg, except the text for a package index, which is made from README.

PROJECT_URL, the address of the repository at its host, makes the links of that text lead there, and adds the addresses
that an index shows beside it. Without it the text has no links to other files.
"""

import os
import re
from pathlib import Path

from setuptools import setup

RELATIVE_LINK = re.compile(r"\[([^]]+)\]\((?!https?://)([^)]*)\)")
IMAGE_AND_CAPTION = re.compile(r"^!\[.*?\n\n", re.MULTILINE | re.DOTALL)


def description(readme: str, url: str) -> str:
    """README without its images, and with links that lead to the repository, or to nowhere without a `url`."""
    text = IMAGE_AND_CAPTION.sub("", readme)
    if url:
        return RELATIVE_LINK.sub(rf"[\1]({url}/blob/HEAD/\2)", text)
    text = RELATIVE_LINK.sub(r"\1", text)
    return f"{text}\nThe pages that this text names are in docs/ of the source distribution.\n"


url = os.environ.get("PROJECT_URL", "").rstrip("/")
setup(
    long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8"), url),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": url,
        "Documentation": f"{url}/tree/HEAD/docs",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    if url
    else {},
)
