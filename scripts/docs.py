#!/usr/bin/env python3
"""Make the generated parts of README.md and docs/ anew.

    scripts/docs.py                    what comes from the declarations, and from the tables under ci/
    scripts/docs.py --check            change nothing; 1 if one of them is not what those say
    scripts/docs.py --runs             also tables, a log line and pictures of the demo's runs, in some minutes
    scripts/docs.py --memory PYTHON    also the bytes that Megatron-FSDP holds

--runs needs torch, megatron-core 0.18.2, emerging-optimizers and matplotlib beside this project; PYTHON needs torch,
einops and megatron-core 0.16.1 or 0.17.1 (later ones hold the same with the patches and without). What is generated
stands between `<!-- made by scripts/docs.py: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pythons import executable

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="only say what is out of date")
    which.add_argument("--runs", action="store_true", help="train, and show what came of it")
    parser.add_argument("--memory", type=executable, metavar="PYTHON", help="measure with this one")
    parser.add_argument("--work", type=Path, default=ROOT / "demo_output", help="folder for the runs of --runs")
    options = parser.parse_args()
    contents = declared.blocks() | kept.blocks()
    if options.runs:
        contents |= measured.blocks(options.work.resolve(), ROOT / "docs")
    if options.memory:
        contents["memory"] = measured.memory(options.memory)
    stale = 0
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = file.read_text(encoding="utf-8")
        after = markdown_pages.fill(before, contents)
        if after != before:
            stale += 1
            print(f"{file.relative_to(ROOT)}: {'out of date; run scripts/docs.py' if options.check else 'made anew'}")
            if not options.check:
                file.write_text(after, encoding="utf-8")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "patches"), str(ROOT)]
    try:
        import markdown_pages

        from docs import declared, kept, measured
    except ModuleNotFoundError as missing:
        sys.exit(f"{missing}: this needs packaging and rich")
    sys.exit(main())
