"""The distributions, built by setuptools from a copy of the tree: the tree itself stays clean."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = ("rich", "markdown-it-py", "mdurl", "pygments", "wrapt")


@pytest.fixture(scope="session")
def distributions(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built from it, as pip would: what the sdist lacks is missed."""
    pytest.importorskip("setuptools", "77", reason="needs the setuptools of pyproject.toml; nox has it")
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*_output")
    shutil.copytree(ROOT, tree, dirs_exist_ok=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.fixture(scope="session")
def sdist(distributions) -> Path:
    return next(distributions.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def wheel(distributions) -> Path:
    return next(distributions.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel unpacked, as in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@dataclass(frozen=True)
class Environment:
    """A Python that has the wheel and what it requires, and neither torch nor Megatron."""

    python: Path
    site: Path

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this Python, in a folder of no interest, without the variables that would change what it is."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MEGATRON_MTP_", "PYTHON"))}
        env = {**kept, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb", **variables}
        command = [self.python, *words]
        return subprocess.run(command, env=env, cwd=self.site.parent, capture_output=True, text=True, timeout=240)

    def prints(self, *words: str, **variables: str) -> str:
        """What it prints; it must end with 0, and without a word on stderr."""
        done = self.run(*words, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def fails(self, *words: str, **variables: str) -> str:
        """The last line on stderr; it must end with 1, having printed nothing."""
        done = self.run(*words, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr.splitlines()[-1]

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "megatron_mtp_patches", *words, **variables)


@pytest.fixture(scope="session")
def make_environment(wheel, installed, tmp_path_factory):
    """make_environment(pip=False): a new one; with pip, the wheel is installed instead of unpacked."""

    def make(pip: bool = False) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), folder], check=True)
        environment = Environment(folder / "bin" / "python", next(folder.glob("lib/python*/site-packages")))
        for name in REQUIRED:
            required = distribution(name)
            for entry in {file.parts[0] for file in required.files or () if file.parts[0] != ".."}:
                (environment.site / entry).symlink_to(required.locate_file(entry))
        if pip:
            environment.prints("-m", "pip", "install", "--quiet", "--no-index", str(wheel))
        else:
            shutil.copytree(installed, environment.site, dirs_exist_ok=True)
        return environment

    return make


@pytest.fixture(scope="module")
def environment(make_environment) -> Environment:
    return make_environment()
