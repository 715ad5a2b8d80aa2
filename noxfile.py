"""The test matrix of ci/matrix.toml: `nox -s 'tests(release="0.18.2")'`, or all of it with scripts/test.sh.

Each session leaves pytest's JUnit report in .nox/results/ for ci/report.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["python", "tests", "without_transformer_engine", "compatibility", "lint", "wheel", "tables"]
if os.environ.get("MEGATRON_LM"):
    nox.options.sessions += ["replay"]

MATRIX = nox.project.load_toml("ci/matrix.toml")
RESULTS = Path(".nox", "results")
RELEASES = [
    release["version"]
    for release in MATRIX["release"]
    if sys.version_info >= tuple(map(int, release["python"].split(".")))
]
THIS_PYTHON = "{}.{}".format(*sys.version_info)  # which the other environments have
# The suites that depend on torch or on this Python alone run here.
TORCH_RELEASE = "0.18.2" if "0.18.2" in RELEASES else RELEASES[-1]
TABLE_RELEASES = {"0.18.2", "0.19.2"}  # without which there is nothing to compare


def paths(*depends: str, quick: bool = False, key: str = "tests") -> list[str]:
    """What the suites that depend on one of these have under `key`."""
    suites = [suite for suite in MATRIX["suite"] if suite["depends"] in depends and (suite.get("quick") or not quick)]
    return [path for suite in suites for path in suite.get(key, [])]


def run_pytest(session: nox.Session, name: str, tests: list[str]) -> None:
    """Run `tests`, or what is named after --, and leave the report as `name`.xml."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    # Without bytecode every process would compile torch and Megatron again.
    environment = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", "-q", f"--junitxml={RESULTS / name}.xml", *tests, env=environment)


@nox.session(python=[version for version in MATRIX["pythons"] if version != THIS_PYTHON])
def python(session: nox.Session) -> None:
    """The suites that need no torch, on each other Python that is installed."""
    session.install("-e", ".", "hypothesis", "pytest", "pytest-timeout", "tomli; python_version < '3.11'")
    run_pytest(session, f"Python {session.python}", session.posargs or paths("python"))


@nox.session
@nox.parametrize("release", RELEASES)
def tests(session: nox.Session, release: str) -> None:
    """The suites that depend on a release, or what is named after --; with -- --quick, those of the inner loop.

    Its TransformerEngine lacks the compiled extension: outside a rehearsal this Megatron cannot be imported.
    """
    version = next(one["transformer_engine"] for one in MATRIX["release"] if one["version"] == release)
    install(session, release, extras="demo,test,te")
    session.install("--no-deps", f"transformer-engine=={version}")
    if session.posargs == ["--quick"]:
        chosen = paths("python", "release", quick=True)
    else:
        chosen = session.posargs or paths("release")
    run_pytest(session, release, chosen)


@nox.session
def without_transformer_engine(session: nox.Session) -> None:
    """The suites that depend on no release and what runs differently without it, or what is named after --."""
    install(session, TORCH_RELEASE)
    chosen = session.posargs or paths("python", "torch") + paths("release", key="without_transformer_engine")
    run_pytest(session, f"{TORCH_RELEASE} without TransformerEngine", chosen)


@nox.session
def compatibility(session: nox.Session) -> None:
    """Libraries that work on Megatron's models, in an environment that no other suite sees."""
    (suite,) = (suite for suite in MATRIX["suite"] if suite["name"] == "compatibility")
    install(session, TORCH_RELEASE, *suite["installs"])
    run_pytest(session, f"{TORCH_RELEASE} with modelopt", session.posargs or suite["tests"])


def install(session: nox.Session, release: str, *more: str, extras: str = "demo,test") -> None:
    session.install("-e", f".[{extras}]", *MATRIX["packages"], f"megatron-core=={release}", "setuptools>=77", *more)


@nox.session(venv_backend="none")
def tables(session: nox.Session) -> None:
    """A sample of each committed table, in the environments that `tests` has made."""
    pythons = {
        release: Path(".nox", f"tests-release-{release.replace('.', '-')}", "bin", "python") for release in RELEASES
    }
    if TABLE_RELEASES - pythons.keys():
        session.skip(f"the tables need megatron-core {' and '.join(sorted(TABLE_RELEASES))}, and so Python >= 3.12")
    given = [f"--python={release}={python.absolute()}" for release, python in pythons.items()]
    environment = {"PYTHONDONTWRITEBYTECODE": ""}
    session.run(str(pythons[TORCH_RELEASE]), "-m", "scripts.docs.samples", *given, *session.posargs, env=environment)


@nox.session
def replay(session: nox.Session) -> None:
    """Upstream's unit tests of the checkouts that MEGATRON_LM names, without and with the patches."""
    session.install("-e", ".[demo,test]", *MATRIX["packages"], "pytest-mock")
    for folder in os.environ["MEGATRON_LM"].split(":"):
        release = ["--release", "HEAD"] if Path(folder, ".git").exists() else []
        session.run("python", "-m", "scripts.replay", "--megatron", folder, *release, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    session.install("ruff", "mypy", "rich", "wrapt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def wheel(session: nox.Session) -> None:
    """What would be published, installed from nothing: without torch and Megatron it says so, and no more."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    session.run("uv", "build", "--out-dir", str(folder), external=True, silent=True)
    (built,) = folder.glob("*.whl")
    session.install("twine")
    session.run("twine", "check", "--strict", str(built), *map(str, folder.glob("*.tar.gz")))
    empty = folder / "empty"
    session.run("uv", "venv", "--python", session.python or sys.executable, str(empty), external=True, silent=True)
    session.run("uv", "pip", "install", "--python", str(empty), str(built), external=True)
    for words, code in (
        (["--version"], 0),
        (["status", "--json"], 1),
        (["doctor"], 1),
        (["enable"], 0),
        (["disable"], 0),
    ):
        command = str(empty / "bin" / "megatron-mtp-patches")
        output = session.run(command, *words, external=True, silent=True, success_codes=[code])
        if code and ("Traceback" in output or "megatron-core is not installed" not in output):
            session.error(f"it does not say what is missing:\n{output}")
