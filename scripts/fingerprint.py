#!/usr/bin/env python3
"""Make fingerprints.json anew from installed or checked-out Megatrons.

    scripts/fingerprint.py 0.16.1=DIR 0.17.1=DIR 0.18.2=DIR 0.19.2=DIR main=DIR

Each DIR holds `megatron/` (site-packages, or a checkout), from the oldest to the newest. A release whose wheel
lacks megatron.training (0.16.1) is read from its checkout. Everything is read as text; nothing is imported.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "patches"))

from megatron_mtp_patches.catalog import CATALOG  # noqa: E402
from megatron_mtp_patches.engine.fingerprints import make_table  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="RELEASE=DIR")
    sources = {}
    for word in parser.parse_args().sources:
        release, _, folder = word.partition("=")
        if not Path(folder, "megatron", "core", "__init__.py").is_file():
            parser.error(f"{word}: {folder or 'nothing'} holds no megatron/core")
        sources[release] = [folder]
    table = make_table(CATALOG, sources)
    file = ROOT / "patches" / "megatron_mtp_patches" / "fingerprints.json"
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(table['targets'])} targets in {len(sources)} releases -> {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
