"""Megatron-LM of each release: a git repository, a folder of plain trees, or one such tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from replay.source import Repository, SourceError  # noqa: E402


class Checkout(NamedTuple):
    """`replay` is what scripts/replay_upstream.py is told; only what has a history can be asked for other commits."""

    release: str
    folder: Path
    replay: list[str]
    has_history: bool


def find(where: Path, work: Path, refs: dict[str, str]) -> dict[str, Checkout]:
    """{release: checkout}, oldest first; of a repository those of `refs` that it has.

    Raises:
        SourceError: what is wrong with `where`.
    """
    if not where.is_dir():
        raise SourceError(f"--megatron {where}: no such folder")
    if (where / ".git").exists() or (where / "HEAD").is_file():
        return _of_history(where, work, refs)
    children = [where, *(child for child in where.iterdir() if child.is_dir())]
    trees = [child for child in children if (child / "megatron/core/package_info.py").is_file()]
    if not trees:
        raise SourceError(
            f"--megatron {where}: neither a git repository nor a folder of Megatron-LM trees (each with megatron/core)"
        )
    found = [_plain(tree, work) for tree in trees]
    return {one.release: one for one in sorted(found, key=lambda one: _order(one.release))}


def _of_history(where: Path, work: Path, refs: dict[str, str]) -> dict[str, Checkout]:
    repository, found = Repository(str(where), work), {}
    for release, ref in refs.items():
        try:
            tree = repository.unpack(release, ref)
        except SourceError:
            continue
        found[release] = Checkout(release, tree.folder, ["--megatron", str(where), "--release", release], True)
    return found


def _plain(tree: Path, work: Path) -> Checkout:
    repository = Repository(str(tree), work)
    if repository.plain is None:  # a checkout of its own: as it is
        raise SourceError(f"--megatron: {tree} is a git repository; give that one, or trees without .git")
    return Checkout(repository.version(), tree.resolve(), ["--megatron", str(tree.resolve())], False)


def _order(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]
