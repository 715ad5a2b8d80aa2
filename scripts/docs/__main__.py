"""Make the generated parts of README.md and docs/ again. Needs packaging, rich and torch.

    python -m scripts.docs                    what comes from the declarations, and from the tables under ci/
    python -m scripts.docs --check            change nothing; 1 if one of them is not what those say, or has no page

What is generated stands between `<!-- made by python -m scripts.docs: NAME -->` and `<!-- end -->`. Longer lists are
made when the site is built, and take the place of a sentence: `<!-- made by nox -s docs: NAME -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_mtp_patches.catalog import CATALOG

from scripts.common.arguments import make_parser
from scripts.common.markdown import BLOCK, fill
from scripts.common.process import ROOT

from . import declared, defects, kept, site
from .addresses import topic

PATCHES = {patch.id for patch in CATALOG}


def main() -> int:
    parser = make_parser("scripts.docs", __doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    options = parser.parse_args()
    contents = declared.blocks() | defects.blocks() | kept.blocks()
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages = {file: file.read_text(encoding="utf-8") for file in files}
    makers = dict.fromkeys(contents, "python -m scripts.docs") | dict.fromkeys(site.lists(), "nox -s docs")
    homeless = sorted(makers.keys() - set(blocks_in_place(pages)))
    for name in homeless:
        lacks = f"docs/{topic(name)}.md lacks, below `## {name}`," if name in PATCHES else "no page has"
        print(f"{lacks} the lines `<!-- made by {makers[name]}: {name} -->` and `<!-- end -->`")
    stale = 0
    for file, before in pages.items():
        after = fill(before, contents)
        if after != before:
            stale += 1
            said = "out of date; run python -m scripts.docs" if options.check else "made again"
            print(f"{file.relative_to(ROOT)}: {said}")
            if not options.check:
                file.write_text(after, encoding="utf-8")
    return int(bool(homeless) or (options.check and stale > 0))


def blocks_in_place(pages: Mapping[Path, str]) -> Iterator[str]:
    """The names of the blocks of all pages; that of a patch only from its section in the page of its topic."""
    for file, text in pages.items():
        for block in BLOCK.finditer(text):
            name, above = block["name"], text[: block.start()]
            if name not in PATCHES or (file.stem == topic(name) and above.endswith(f"\n## {name}\n\n")):
                yield name


if __name__ == "__main__":
    sys.exit(main())
