"""What do the patches do in the Megatron that each framework of ci/pins.toml pins? Needs git and GitHub.

    python -m scripts.pins            write ci/pins.json; `python -m scripts.docs` makes docs/pins.md of it
    python -m scripts.pins --check    change nothing; 1 if ci/pins.json is out of date, or the newest commit of a
                                      framework has another pin

Nothing of Megatron or of a framework is imported or run: the patches read the sources.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine.decision import decide
from megatron_mtp_patches.engine.fingerprints import fingerprint
from megatron_mtp_patches.engine.state import State
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.megatrons.installed import known_sources

from scripts.common.arguments import make_parser
from scripts.common.process import ROOT, run_or_exit
from scripts.common.toml import read_toml

DATA, TABLE = ROOT / "ci" / "pins.toml", ROOT / "ci" / "pins.json"
MEGATRON = "NVIDIA/Megatron-LM"
PATCHES = [patch for patch in CATALOG if not patch.package]
Pin = dict[str, Any]


def main() -> int:
    parser = make_parser("scripts.pins", __doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    options = parser.parse_args()
    pins = read_toml(DATA)["pin"]
    text = json.dumps([read(pin) for pin in pins], indent=1) + "\n"
    if not options.check:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    problems = [problem for pin in pins if (problem := find_newer_pin(pin))]
    if text != TABLE.read_text(encoding="utf-8"):
        problems.append(f"{TABLE.relative_to(ROOT)} is out of date: run python -m scripts.pins")
    print("\n".join(problems) or "up to date")
    return int(bool(problems))


def read(pin: Pin) -> Pin:
    """What the patches do in the Megatron of `pin`."""
    with tempfile.TemporaryDirectory() as megatron, tempfile.TemporaryDirectory() as framework:
        fetch(Path(framework), pin["repository"], pin["commit"], "--filter=blob:none")
        if not stands_there(pin, framework):
            sys.exit(f"{pin['framework']}: {pin['file']} of {pin['commit']} does not say {pin['says']}")
        fetch(Path(megatron), MEGATRON, pin["megatron"])
        git(megatron, "checkout", "-q", "FETCH_HEAD")
        commit = git(megatron, "rev-parse", "FETCH_HEAD^{commit}").strip()
        return {"framework": pin["framework"], "commit": commit, **examine(megatron)}


def examine(folder: str) -> dict[str, Any]:
    """The nearest release, the state of each patch, and {unknown target: the patches that are refused for it}."""
    sources, path = known_sources(), [folder]
    states = {patch.id: decide(patch, sources, ENGINE.project, path).state for patch in PATCHES}
    unknown: dict[str, list[str]] = {}
    for patch in PATCHES:
        checked = {edit.target: edit for edit in patch.edits if edit.check_source}
        for target, edit in checked.items() if states[patch.id] is State.REFUSED else ():
            if not sources.releases_with(target, fingerprint(edit, path)):
                unknown.setdefault(target, []).append(patch.id)
    return {"like": sources.nearest_release(tuple(PATCHES), path), "states": states, "unknown": unknown}


def find_newer_pin(pin: Pin) -> str:
    """Why `pin` is not that of the framework's newest commit; '' if it is."""
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder), pin["repository"], "HEAD", "--filter=blob:none")
        if stands_there(pin, folder):
            return ""
        return f"{pin['framework']}: {pin['file']} of its newest commit does not say {pin['says']}; edit ci/pins.toml"


def stands_there(pin: Pin, folder: str) -> bool:
    """True if the file of what was fetched into `folder`, or the submodule there, says what `pin` says."""
    entry = git(folder, "ls-tree", "FETCH_HEAD", pin["file"])
    text = git(folder, "show", f"FETCH_HEAD:{pin['file']}") if " blob " in entry else entry
    return pin["says"] in text


def fetch(folder: Path, repository: str, revision: str, *options: str) -> None:
    """Make `folder` a repository with this one commit, as FETCH_HEAD."""
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", f"https://github.com/{repository}")
    git(folder, "fetch", "-q", "--depth=1", *options, "origin", revision)


def git(folder: str | Path, *words: str) -> str:
    return run_or_exit(["git", "-C", str(folder), *words])


if __name__ == "__main__":
    sys.exit(main())
