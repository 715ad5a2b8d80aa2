"""The two Megatrons of an upgrade: where each lies, and the Python that imports it."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import megatron_mtp_patches
import megatron_overrides

from ...engine import PatchError, UsageError
from ...engine.source import find_file

FORMS = (
    "name a checkout or a folder of packages, as megatron-lm or /opt/venv/lib/python3.12/site-packages, a wheel, "
    "a Python in which Megatron is installed, or a release, as 0.19.2, for pip to download"
)


class Tree(NamedTuple):
    """A Megatron.

    Attributes:
        name: as the user calls it.
        python: the Python that imports it.
        folders: what comes first on its path.
    """

    name: str
    python: str
    folders: tuple[str, ...] = ()

    def call(self, target: str, options: object) -> bytes:
        """What the function `target` ("MODULE:NAME") returns in a process that finds this Megatron.

        Raises:
            PatchError: the process fails.
            UsageError: the function raises it.
        """
        with tempfile.TemporaryDirectory() as folder:
            for package in (megatron_mtp_patches, megatron_overrides):  # and not all that is installed beside them
                Path(folder, package.__name__).symlink_to(Path(package.__path__[0]).absolute())
            others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            path = [*self.folders, folder, *(one for one in others if not Path(one, "megatron", "core").is_dir())]
            options_file, answer_file = Path(folder, "options"), Path(folder, "answer")
            options_file.write_bytes(pickle.dumps(options))
            done = subprocess.run(
                [self.python, "-c", _PROGRAM, target, str(options_file), str(answer_file)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                capture_output=True,
                text=True,
            )
            if done.returncode == UsageError.exit_code:
                raise UsageError(f"{self.name}: {answer_file.read_text()}")
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise PatchError(f"{self.name} does not run in {self.python}: {lines[-1]}")
            return answer_file.read_bytes()


_PROGRAM = """
import importlib, pathlib, pickle, sys
options, answer = map(pathlib.Path, sys.argv[2:])
# Not the working directory, which may be a checkout. A script that is run has its folder in the first place.
sys.path[:] = [str(options.parent), *filter(None, sys.path)]
from megatron_mtp_patches.engine import PatchError, UsageError
module, _, name = sys.argv[1].partition(":")
try:
    answer.write_bytes(getattr(importlib.import_module(module), name)(pickle.loads(options.read_bytes())))
except PatchError as error:
    answer.write_text(str(error))
    sys.exit(UsageError.exit_code)
"""


@contextlib.contextmanager
def open_tree(name: str) -> Iterator[Tree]:
    """Yield the Megatron that a user calls `name`; what is unpacked or downloaded for it is removed afterwards.

    Raises:
        UsageError: nothing is called so, there is no Megatron in it, or pip cannot download it.
    """
    file = Path(name)
    if name and all(map(os.path.isdir, name.split(os.pathsep))):
        folders = tuple(str(Path(folder).absolute()) for folder in name.split(os.pathsep))
        if find_file("megatron.core", list(folders)) is None:
            raise UsageError(f"there is no megatron/core in {name}: {FORMS}")
        yield Tree(name, sys.executable, folders)
    elif file.is_file() and file.suffix != ".whl" and os.access(file, os.X_OK):
        yield Tree(name, str(file.absolute()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            wheel = file if file.is_file() and file.suffix == ".whl" else _download(name, folder)
            packages = Path(folder, "packages")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
            if find_file("megatron.core", [str(packages)]) is None:
                raise UsageError(f"there is no megatron/core in {name}: {FORMS}")
            yield Tree(name, sys.executable, (str(packages),))


def _download(name: str, folder: str) -> Path:
    """The wheel of the release `name`, downloaded by pip into `folder`."""
    if not re.fullmatch(r"\d+(\.\d+)+(\.?(a|b|rc|dev|post)\d+)*", name):
        raise UsageError(f"{name!r} is no Megatron: {FORMS}")
    pip = (
        [sys.executable, "-m", "pip"]
        if find_spec("pip")
        else [shutil.which("pip") or "pip", "--python", sys.executable]
    )
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"megatron-core=={name}"]
    try:
        done = subprocess.run([*pip, *words], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no pip to download megatron-core {name}: name a folder or a wheel instead"
        ) from error
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise UsageError(f"pip cannot download megatron-core {name} ({lines[-1]}): name a folder or a wheel instead")
    return wheels[0]
