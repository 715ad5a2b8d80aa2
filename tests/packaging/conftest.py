"""The distributions, built by setuptools from a copy of the tree: the tree itself stays clean."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md")
REQUIRED = ("rich", "markdown-it-py", "mdurl", "pygments", "wrapt")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy of what the distributions are made of."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", *PAGES):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for name in ("patches", "megatron_overrides", "tests", "scripts", "docs", "ci"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def _build(tree: Path, what: str) -> Path:
    pytest.importorskip("setuptools", "77", reason="needs the setuptools of pyproject.toml; nox has it")
    output = tree.parent / what
    output.mkdir()
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(output)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def sdist(tree) -> Path:
    return _build(tree, "sdist")


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the sdist, as pip would where there is no wheel: what the sdist lacks is missed here."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return _build(next(folder.iterdir()), "wheel")


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel unpacked, as in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    unpack(wheel, folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


@dataclass(frozen=True)
class Environment:
    """A Python that has the wheel and what it requires, and neither torch nor Megatron."""

    python: Path
    site: Path

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this Python, in a folder of no interest, without the variables that would change what it is."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MEGATRON_MTP_", "PYTHON"))}
        mine = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
        return subprocess.run(
            [self.python, *words],
            env={**kept, **mine, **variables},
            cwd=self.site.parent,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "megatron_mtp_patches", *words, **variables)


@pytest.fixture(scope="session")
def make_environment(wheel, tmp_path_factory):
    """make_environment(pip=False): a new one; with pip, the wheel is installed instead of unpacked."""

    def make(pip: bool = False) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), folder], check=True)
        made = Environment(folder / "bin" / "python", next(folder.glob("lib/python*/site-packages")))
        for name in REQUIRED:
            found = distribution(name)
            for entry in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
                (made.site / entry).symlink_to(found.locate_file(entry))
        if pip:
            done = made.run("-m", "pip", "install", "--quiet", "--no-index", str(wheel))
            assert done.returncode == 0, done.stderr
        else:
            unpack(wheel, made.site)
        return made

    return make


@pytest.fixture(scope="module")
def environment(make_environment) -> Environment:
    return make_environment()
