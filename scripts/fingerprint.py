#!/usr/bin/env python3
"""Make fingerprints.json anew from installed or checked-out Megatrons.

    scripts/fingerprint.py 0.16.1=DIR:DIR 0.17.1=DIR 0.18.2=DIR 0.19.2=DIR main=DIR

Each DIR holds `megatron/` (site-packages, or a checkout), from the oldest release to the newest. Several may hold the
same release: the first says what the release has, so it is the checkout where the wheel has no megatron.training
(0.16.1); the files of the others are known, too. Everything is read as text; nothing is imported.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "patches"))

from megatron_mtp_patches.catalog import BASE, CATALOG  # noqa: E402
from megatron_mtp_patches.engine.fingerprints import make_table  # noqa: E402


def as_text(table: dict) -> str:
    """The table as JSON, each known file in one line."""
    modules = [
        f"  {json.dumps(module)}: {{\n"
        + ",\n".join(f"   {json.dumps(digest)}: {json.dumps(answers)}" for digest, answers in by_hash.items())
        + "\n  }"
        for module, by_hash in table["files"].items()
    ]
    rest = json.dumps({part: table[part] for part in table if part != "files"}, indent=1).removesuffix("\n}")
    return f'{rest},\n "files": {{\n' + ",\n".join(modules) + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="RELEASE=DIR[:DIR]")
    sources = {}
    for word in parser.parse_args().sources:
        release, _, folders = word.partition("=")
        sources[release] = folders.split(os.pathsep)
        for folder in sources[release]:
            if not Path(folder, "megatron", "core", "__init__.py").is_file():
                parser.error(f"{word}: {folder or 'nothing'} holds no megatron/core")
    table = make_table((*BASE, *CATALOG), sources)
    file = ROOT / "patches" / "megatron_mtp_patches" / "fingerprints.json"
    file.write_text(as_text(table), encoding="utf-8")
    print(f"{len(table['targets'])} targets in {len(sources)} releases -> {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
