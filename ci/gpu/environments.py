"""One virtual environment for each release, from a folder of wheels; torch is the machine's. Imports no package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("torch", "megatron-core", "emerging-optimizers", "transformer-engine", "apex", "pytest")
# Megatron's trainer compiles its dataset helpers; upstream's tests use pytest-mock.
WANTED = ("emerging-optimizers", "transformer-engine", "transformer-engine-torch", "apex", "pybind11", "pytest-mock")
PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
found = {}
for name, module in json.loads(sys.argv[1]).items():
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(module) is not None:
            found[name] = "present"
print(json.dumps(found))
"""


class CannotMake(Exception):
    """What is missing."""


def releases_in(wheels: Path) -> list[str]:
    """Of megatron-core, oldest first."""
    found = {match[1] for file in wheels.iterdir() if (match := re.match(r"megatron_core-([\d.]+)-", file.name))}
    return sorted(found, key=lambda release: [int(part) for part in release.split(".")])


def make(release: str, wheels: Path, folder: Path) -> str:
    """The Python of the environment of `release`, made if it is not there."""
    python = folder / "bin" / "python"
    done = folder / "done"
    if not done.is_file():
        try:
            venv.create(folder, system_site_packages=True, with_pip=True, clear=True)
        except subprocess.CalledProcessError as error:
            raise CannotMake(f"{sys.executable} -m venv fails, install its venv and ensurepip: {error}") from None
        _see_the_same_packages(folder)
        needed, wanted = requirements()
        missing = install(python, wheels, f"megatron-core=={release}", *needed)
        if missing:
            raise CannotMake(f"{wheels} lacks something that {release} needs: {missing}")
        for requirement in wanted:
            install(python, wheels, requirement)
        done.write_text("")
    return str(python)


def _see_the_same_packages(folder: Path) -> None:
    """--system-site-packages shows those of the base Python; where this one is an environment too, here are its own."""
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "below.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))


def install(python: Path, wheels: Path, *requirements: str) -> str:
    """Nothing, or what pip says is wrong. No registry is asked."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    return " ".join(done.stderr.split("\n")[:2]) if done.returncode else ""


def requirements() -> tuple[list[str], list[str]]:
    """What every stage needs, and what only some do."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = config["options"]["install_requires"].split("\n")
    extras = [line for extra in config["options.extras_require"].values() for line in extra.split("\n")]
    return [line for line in [*needed, "pytest"] if line], [line for line in [*extras, *WANTED] if line]


def versions(python: str) -> dict[str, str]:
    modules = {name: name.replace("-", "_").replace("megatron_core", "megatron") for name in NAMES}
    done = subprocess.run([python, "-W", "ignore", "-c", PROBE, json.dumps(modules)], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def use_tools(wheels: Path | None, folder: Path) -> None:
    """Start again in an environment that has rich, if this Python has none."""
    try:
        import rich  # noqa: F401
    except ImportError:
        python = folder / "bin" / "python"
        if wheels is None or Path(sys.prefix).resolve() == folder.resolve():
            sys.exit("rich is missing: install it, or give --wheels a folder that has its wheel")
        venv.create(folder, system_site_packages=True, with_pip=True, clear=True)
        missing = install(python, wheels, "rich")
        if missing:
            sys.exit(f"{wheels} lacks rich: {missing}")
        os.execv(python, [str(python), *sys.argv])
