"""Read the sources of every known Megatron again, and write what the patches ask of them.

    nox -s accept -- CLONE          CLONE: a git repository of Megatron-LM, or its URL

A release is its wheel and its TransformerEngine, as they are installed in the environment that `tests` makes, and the
scripts of its tag, as pretrain_gpt.py, which are in no wheel; main is the commit of megatrons.json. Writes
fingerprints.json and defects.json.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from megatron_mtp_patches.megatrons.known import MAIN, MEGATRONS, REFERENCE

from scripts.common.arguments import add_pythons, make_parser
from scripts.common.process import ROOT, environment
from scripts.replay.source import Repository, SourceError

SOURCES = ROOT / ".nox" / "sources"


def main() -> int:
    parser = make_parser("scripts.read_sources", __doc__)
    parser.add_argument("--megatron", required=True, metavar="PATH_OR_URL", help="Megatron-LM")
    add_pythons(parser)
    options = parser.parse_args()
    try:
        repository = Repository(options.megatron, SOURCES)
        if repository.git is None:
            raise SourceError(f"{options.megatron} has no history: give a git repository that has the tags of releases")
        for one in MEGATRONS:
            checkout, wheel = repository.unpack(one["tag"]).folder, site_packages(options.python[one["version"]])
            # 0.19.2 has no tag: the scripts are those of another one, the rest is its wheel's.
            has_tag = one["tag"] == f"core_v{one['version']}"
            accept(one["version"], *((checkout, wheel) if has_tag else (wheel, checkout)))
            accept(f"transformer-engine {one['transformer_engine']}", wheel)
        alone = SOURCES / "emerging" / "emerging_optimizers"
        shutil.copytree(site_packages(options.python[REFERENCE]) / alone.name, alone, dirs_exist_ok=True)
        accept("main", repository.unpack(MAIN).folder, alone.parent)
    except SourceError as error:
        parser.error(str(error))
    return 0


def accept(release: str, *folders: Path) -> None:
    against = ":".join(map(str, folders))
    command = [sys.executable, "-m", "megatron_mtp_patches", "drift", "--against", against, "--accept", release]
    subprocess.run(command, env=environment("none"), check=True)


def site_packages(python: str) -> Path:
    """The folder of packages in the environment of a Python."""
    (folder,) = Path(python).parents[1].glob("lib/python*/site-packages")
    return folder


if __name__ == "__main__":
    sys.exit(main())
