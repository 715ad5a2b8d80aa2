"""Find upstream's tests in a checkout, a bare repository or a URL, and unpack each release into a plain tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path

from megatron_mtp_patches.megatrons.known import REFS

UNIT_TESTS = Path("tests", "unit_tests")
IMPORTED = ("megatron", "tests", "examples", "tools", "pyproject.toml")


class SourceError(Exception):
    """Says what is wrong with the given Megatron-LM, and what would be right."""


@dataclass
class Tree:
    """An unpacked release; `folder` holds megatron/ and tests/."""

    release: str
    folder: Path
    commit: str


class Repository:
    """The history of Megatron-LM (`git`), or one tree without a history (`plain`)."""

    def __init__(self, where: str, work: Path) -> None:
        self.work = work
        self.git: Path | None = None
        self.plain: Path | None = None
        if re.match(r"\w+://|git@", where):
            self.git = _clone(where, work / "Megatron-LM.git")
        elif not Path(where).is_dir():
            raise SourceError(f"--megatron {where}: no such folder. Give a Megatron-LM checkout, or a URL to clone.")
        elif _is_repository(Path(where)):
            self.git = Path(where).resolve()
        elif Path(where, "megatron", "core", "package_info.py").is_file():
            self.plain = Path(where).resolve()
        else:
            raise SourceError(f"--megatron {where}: neither a git repository nor a folder that holds megatron/core.")

    def version(self) -> str:
        """Return the release of a tree without a history; main and dev name theirs, too."""
        assert self.plain is not None
        text = (self.plain / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
        parts = [re.search(rf"^{name} = ['\"]?(\w+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(part[1] for part in parts if part)

    def check(self, release: str) -> None:
        """Refuse a release that this is not, or that names no tag, branch or commit."""
        if self.plain and release != self.version():
            raise SourceError(
                f"--release {release}: {self.plain} is {self.version()} and has no history. Leave --release out, or "
                f"give a git repository."
            )
        if self.git and release not in REFS:
            self.commit(release)

    def unpack(self, release: str) -> Tree:
        """Return the tree of a release, tag, branch or commit; git objects stay where they are."""
        if self.plain:
            return Tree(release, self.plain, "")
        commit = self.commit(REFS.get(release, release))
        folder = self.work / f"{release}-{commit[:12]}"
        if not (folder / UNIT_TESTS).is_dir():
            self._extract(commit, folder)
        return Tree(release, folder, commit)

    def take(self, tree: Tree, ref: str, file: str) -> str | None:
        """Write a test file of another commit beside the tree's files; return its path below tests/unit_tests.

        Without a history it may have been written before; None if it was not.
        """
        target = Path(file).with_name(f"{Path(file).stem}_of_{re.sub(r'[^A-Za-z0-9]+', '_', ref)}.py")
        if self.git is None:
            return str(target) if (tree.folder / UNIT_TESTS / target).is_file() else None
        text = _git(self.git, "show", f"{self.commit(ref)}:{UNIT_TESTS / file}")
        (tree.folder / UNIT_TESTS / target).parent.mkdir(parents=True, exist_ok=True)
        (tree.folder / UNIT_TESTS / target).write_bytes(text)
        return str(target)

    def commit(self, ref: str) -> str:
        assert self.git is not None
        for name in (ref, f"origin/{ref}"):
            try:
                return _git(self.git, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
            except subprocess.CalledProcessError:
                continue
        raise SourceError(f"{self.git} has no {ref}. Fetch it: git -C {self.git} fetch origin {ref}:{ref}")

    def _extract(self, commit: str, folder: Path) -> None:
        """Extract the folders and root modules that tests import, and copy the installed wheel's compiled helpers."""
        assert self.git is not None
        root = _git(self.git, "ls-tree", "--name-only", commit).decode().split()
        names = [name for name in root if name in IMPORTED or name.endswith(".py")]
        with tarfile.open(fileobj=BytesIO(_git(self.git, "archive", commit, *names))) as tar:
            tar.extractall(folder, filter="data")
        for compiled in wheel_files("megatron/core/datasets/helpers_cpp*.so"):
            shutil.copy(compiled, folder / "megatron" / "core" / "datasets")


def _clone(url: str, folder: Path) -> Path:
    if not folder.is_dir():
        command = ["git", "clone", "--bare", "--filter=blob:none", url, str(folder)]
        if subprocess.run(command, check=False).returncode:
            raise SourceError(f"--megatron {url}: cannot be cloned, see above.")
        _git(folder, "config", "--add", "remote.origin.fetch", "+refs/pull/*/head:refs/pull/*/head")
        _git(folder, "fetch", "--quiet", "origin", "refs/pull/5395/head:refs/pull/5395/head")
    return folder


def wheel_files(pattern: str) -> list[Path]:
    """Return the files of the installed megatron-core that match; none if it is not installed."""
    try:
        files = metadata.files("megatron-core") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.match(pattern)]


def _is_repository(folder: Path) -> bool:
    return (folder / ".git").exists() or (folder / "HEAD").is_file()


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True).stdout
