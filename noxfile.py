"""The test matrix of ci/matrix.toml: `nox -s 'tests(release="0.18.2")'`, or all of it with scripts/test.sh.

With ALL_TESTS=1 every test runs on each release (scripts/test.sh --all).

Each session leaves pytest's JUnit report in .nox/results/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
# What `nox` runs without names: the reference release, the other releases, what depends on no release or has another
# environment, and what compares the environments of the releases.
REFERENCE_TAG, RELEASES_TAG, OTHERS_TAG, TOGETHER_TAG = ["reference"], ["releases"], ["others"], ["together"]
nox.options.tags = REFERENCE_TAG + RELEASES_TAG + OTHERS_TAG + TOGETHER_TAG

MATRIX = nox.project.load_toml("ci/matrix.toml")
LIST = Path("patches", "megatron_mtp_patches", "megatrons.json")
MEGATRONS = json.loads(LIST.read_text(encoding="utf-8"))
RESULTS = Path(".nox", "results")
TEST_VARIABLES = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}  # else each process compiles torch again
RELEASES = [
    release["version"]
    for release in MEGATRONS["megatrons"]
    if sys.version_info >= tuple(map(int, release["python"].split(".")))
]
THIS_PYTHON = "{}.{}".format(*sys.version_info)  # which the other environments have
# The suites of torch run here.
TORCH_RELEASE = MEGATRONS["default"] if MEGATRONS["default"] in RELEASES else RELEASES[-1]
# Other tests of conformance look for each edit, whatever it does, and tests of the engine and the command know none.
NOTICE_EDITS = [
    "tests/conformance/test_conformance.py::test_the_record_is_in_megatron_s_arguments",
    "tests/conformance/test_start_line.py",
    "tests/functional",
    "tests/megatron_overrides",
    "tests/multirank",
    "tests/reproductions/test_programs.py",
    "tests/end_to_end",
]
REFERENCE = MEGATRONS["reference"] if MEGATRONS["reference"] in RELEASES else RELEASES[-1]  # runs every test
EVERYTHING = bool(os.environ.get("ALL_TESTS"))  # every suite, and every test on each release
ENVIRONMENTS = [
    one for one in MATRIX["environment"] if one["release"] in RELEASES and (EVERYTHING or not one.get("scheduled"))
]
CONFORMANCE = "tests/conformance"
COMPARED = {MEGATRONS["default"], MEGATRONS["reference"]}


def paths(*depends: str, quick: bool = False, key: str = "tests") -> list[str]:
    """What the suites that depend on one of these have under `key`."""
    suites = [suite for suite in MATRIX["suite"] if suite["depends"] in depends and (suite.get("quick") or not quick)]
    suites = [suite for suite in suites if EVERYTHING or not suite.get("scheduled")]
    return [path for suite in suites for path in suite.get(key, [])]


def tests_of(release: str) -> list[str]:
    """Everything on the reference release.

    On each other one what suites have under `each_release`, and the tests that notice an edit that is missing there.
    """
    if EVERYTHING or release == REFERENCE:
        return [*paths("release"), *["--everywhere"] * EVERYTHING]
    chosen = paths("release", key="each_release")
    rows = json.loads(Path("ci", "noticed_edits.json").read_text(encoding="utf-8"))
    noticing = {test for tests in rows.values() for test, releases in tests.items() if release in releases}
    return chosen + sorted(test for test in noticing if "::" in test and not test.startswith(tuple(chosen)))


def run_pytest(session: nox.Session, name: str, tests: list[str]) -> None:
    """Run `tests`, or what is named after --, and leave the report as `name`.xml."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    options = ["-q", "--durations=10", f"--junitxml={RESULTS / name}.xml"]
    session.run("python", "-m", "pytest", *options, *tests, env=TEST_VARIABLES)


@nox.session(tags=OTHERS_TAG, python=[version for version in MATRIX["pythons"] if version != THIS_PYTHON])
def python(session: nox.Session) -> None:
    """The suites that need no torch, on each other Python that is installed."""
    session.install("-e", ".", "hypothesis", "pytest", "pytest-timeout", "tomli; python_version < '3.11'")
    run_pytest(session, f"Python {session.python}", session.posargs or paths("python"))


@nox.session
@nox.parametrize(
    "release", [nox.param(one, tags=REFERENCE_TAG if one == REFERENCE else RELEASES_TAG) for one in RELEASES]
)
def tests(session: nox.Session, release: str) -> None:
    """The tests that a release runs, or what is named after --.

    With -- --quick, the suites of the inner loop; with --conformance, that suite; with --rest, all but that suite.
    Its TransformerEngine lacks the compiled extension: outside a rehearsal this Megatron cannot be imported.
    """
    install(session, release, extras="demo,test,te")
    session.install("--no-deps", transformer_engine(release))
    name, chosen = release, session.posargs or tests_of(release)
    if chosen == ["--quick"]:
        chosen = paths("python", "release", quick=True)
    elif chosen == ["--conformance"]:
        name, chosen = f"{release} conformance", [CONFORMANCE]
    elif chosen == ["--rest"]:
        chosen = [test for test in tests_of(release) if test != CONFORMANCE]
    run_pytest(session, name, chosen)


@nox.session(tags=OTHERS_TAG)
def without_transformer_engine(session: nox.Session) -> None:
    """The suites that depend on no release and what runs differently without it, or what is named after --."""
    install(session, TORCH_RELEASE)
    chosen = session.posargs or paths("python", "torch") + paths("release", key="without_transformer_engine")
    run_pytest(session, f"{TORCH_RELEASE} without TransformerEngine", chosen)


@nox.session(tags=OTHERS_TAG)
@nox.parametrize("library", [nox.param(one, id=one["name"]) for one in ENVIRONMENTS])
def compatibility(session: nox.Session, library: dict) -> None:
    """Libraries and frameworks that use Megatron, each in an environment that no other suite sees."""
    extras = "demo,test,te" if library.get("transformer_engine") else "demo,test"
    install(session, library["release"], *library["installs"], extras=extras)
    alone = list(library.get("alone", ()))
    if library.get("transformer_engine"):
        alone.append(transformer_engine(library["release"]))
    if alone:
        session.install("--no-deps", *alone)
    tests = library["tests"] + (library.get("scheduled_tests", []) if EVERYTHING else [])
    run_pytest(session, f"{library['release']} with {library['name']}", session.posargs or tests)


def transformer_engine(release: str) -> str:
    """The requirement of the TransformerEngine that a release was made for."""
    version = next(one["transformer_engine"] for one in MEGATRONS["megatrons"] if one["version"] == release)
    return f"transformer-engine=={version}"


def install(session: nox.Session, release: str, *more: str, extras: str = "demo,test") -> None:
    session.install("-e", f".[{extras}]", *MATRIX["packages"], f"megatron-core=={release}", "setuptools>=77", *more)


def python_of(name: str, release: str) -> Path:
    """The Python of the environment that the session `name` has made for a release."""
    return Path(".nox", f"{name}-release-{release.replace('.', '-')}", "bin", "python").absolute()


def python_options() -> list[str]:
    """--python RELEASE=PYTHON of each environment that `tests` has made, for a script."""
    return [f"--python={release}={python_of('tests', release)}" for release in RELEASES]


@nox.session(venv_backend="none", default=False)
def dropped_edits(session: nox.Session) -> None:
    """A test notices each edit of the patches that is left out: of 0.18.2, or of the release named after --."""
    release, *options = session.posargs or [TORCH_RELEASE]
    words = ["-q", "--drop-edits", "--everywhere", "-o", "warm_limit=300", *options]
    session.run(str(python_of("tests", release)), "-m", "pytest", *words, *NOTICE_EDITS, env=TEST_VARIABLES)


@nox.session(venv_backend="none", tags=TOGETHER_TAG)
def tables(session: nox.Session) -> None:
    """A sample of the table of ci/compare_releases, in the environments that `tests` has made."""
    run_with_all_releases(session, "scripts.compare_releases.sample")


@nox.session(venv_backend="none", tags=TOGETHER_TAG if EVERYTHING else [])
def upgrade(session: nox.Session) -> None:
    """A training that goes on from its checkpoint on a newer release, in the environments that `tests` has made."""
    run_with_all_releases(session, "scripts.resume_on_newer_release")


def run_with_all_releases(session: nox.Session, module: str) -> None:
    if COMPARED - set(RELEASES):
        session.skip(f"it compares megatron-core {' and '.join(sorted(COMPARED))}, which need Python >= 3.12")
    command = [python_of("tests", TORCH_RELEASE), "-m", module, *python_options(), *session.posargs]
    session.run(*map(str, command), env={"PYTHONDONTWRITEBYTECODE": ""})


@nox.session(venv_backend="none", default=False)
def new(session: nox.Session) -> None:
    """The files of a new patch or known defect: nox -s new -- patch ID TOPIC [MODULE], or defect ID TOPIC [MODULE]."""
    session.run(sys.executable, "-m", "scripts.new", *session.posargs)


@nox.session(venv_backend="none", default=False)
def accept(session: nox.Session) -> None:
    """All that is made of declarations, again: nox -s accept -- CLONE, a git repository of Megatron-LM.

    What the sources of every known Megatron say, the generated parts of the pages, and which tests notice new edits.
    """
    if len(session.posargs) != 1:
        session.error("usage: nox -s accept -- CLONE, where CLONE is a git repository of Megatron-LM or its address")
    python = [str(python_of("tests", TORCH_RELEASE)), "-m"]
    session.run(*python, "scripts.read_sources", *python_options(), f"--megatron={session.posargs[0]}")
    session.run(*python, "scripts.docs")
    session.run(*python, "scripts.noticed_edits", *python_options())


@nox.session(tags=TOGETHER_TAG if os.environ.get("MEGATRON_LM") else [])
def replay(session: nox.Session) -> None:
    """Upstream's unit tests of the checkouts that MEGATRON_LM names, without and with the patches."""
    session.install("-e", ".[demo,test]", *MATRIX["packages"], "click", "mock", "pytest-mock", "requests")
    for folder in os.environ["MEGATRON_LM"].split(":"):
        release = ["--release", "HEAD"] if Path(folder, ".git").exists() else []
        session.run("python", "-m", "scripts.replay", "--megatron", folder, *release, *session.posargs)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Runs that are drawn, each on every cut of its layout: nox -s fuzz -- --minutes 30 [--seed S] [--output FILE].

    With the trainers of the checkouts that MEGATRON_LM names, in the environments that `tests` makes for releases.
    """
    if "MEGATRON_LM" not in os.environ:
        session.error("MEGATRON_LM=DIR[:DIR...] has to name checkouts of Megatron-LM")
    for folder in os.environ["MEGATRON_LM"].split(":"):
        text = Path(folder, "megatron", "core", "package_info.py").read_text(encoding="utf-8")
        minor = ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", text, re.MULTILINE))
        release = next(one for one in RELEASES if one.startswith(f"{minor}."))
        script = Path(folder, "pretrain_gpt.py").absolute()
        command = [python_of("tests", release), "-m", "scripts.fuzz", "--script", script, *session.posargs]
        session.run(*map(str, command), env=TEST_VARIABLES)


@nox.session(venv_backend="none", default=False)
def megatron(session: nox.Session) -> None:
    """Make a Megatron known: nox -s megatron -- VERSION FOLDER TRANSFORMER_ENGINE [TAG], where FOLDER has its sources.

    Lists what a person has to compare with the newest release, and writes the list of Megatrons, fingerprints, pages
    and golden numbers. Needs the environment that `tests` makes for that release.
    """
    if len(session.posargs) not in (3, 4) or not Path(session.posargs[1], "megatron", "core").is_dir():
        session.error("usage: nox -s megatron -- VERSION FOLDER TRANSFORMER_ENGINE [TAG]; FOLDER holds megatron/core")
    version, folder, engine, *tag = session.posargs
    newest = MEGATRONS["megatrons"][-1]
    if version in (one["version"] for one in MEGATRONS["megatrons"]):
        session.error(f"{LIST} has {version} already")
    python = str(python_of("tests", newest["version"]))
    command = [python, "-m", "megatron_mtp_patches", "drift", "--against", folder]
    session.run(*command, "--since", newest["version"], success_codes=[0, 1])
    new = {"version": version, "tag": tag[0] if tag else f"core_v{version}", "transformer_engine": engine}
    MEGATRONS["megatrons"].append({**newest, **new})
    LIST.write_text(json.dumps(MEGATRONS, indent=1) + "\n", encoding="utf-8")
    session.run(*command, "--accept", version)
    session.run(python, "-m", "scripts.docs")
    golden = ["tests/end_to_end/test_golden.py", "--update-golden"]
    session.run(python, "-m", "pytest", "-q", *golden, env={"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"})
    session.log("compare the targets above with the newest release, then see CONTRIBUTING, When a new Megatron appears")


@nox.session(tags=OTHERS_TAG)
def lint(session: nox.Session) -> None:
    """Style and types; with -- --fix, the style is put right."""
    session.install("ruff", "mypy", "rich", "wrapt")
    if session.posargs == ["--fix"]:
        session.run("ruff", "format", ".")  # a long line, for one, is no longer one then
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if session.posargs else ["--check"]), ".")
    session.run("mypy")


@nox.session(tags=OTHERS_TAG)
def docs(session: nox.Session) -> None:
    """The site of the pages, in .nox/site; with -- serve, on this machine's port 8000."""
    session.install("-e", ".[docs]")
    session.run("python", "-m", "mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(tags=OTHERS_TAG)
def wheel(session: nox.Session) -> None:
    """What would be published, installed from nothing: without torch and Megatron it says so, and no more.

    With -- FOLDER, the wheel and the sdist are built there, and stay.
    """
    temporary = Path(session.create_tmp()).resolve()
    shutil.rmtree(temporary)
    folder = Path(*session.posargs).resolve() if session.posargs else temporary
    session.run("uv", "build", "--out-dir", str(folder), external=True, silent=True)
    (built,) = folder.glob("*.whl")
    session.install("twine")
    session.run("twine", "check", "--strict", str(built), *map(str, folder.glob("*.tar.gz")))
    empty = temporary / "empty"
    session.run("uv", "venv", "--python", session.python or sys.executable, str(empty), external=True, silent=True)
    session.run("uv", "pip", "install", "--python", str(empty), str(built), external=True)
    command = [str(empty / "bin" / "megatron-mtp-patches"), "doctor"]
    if "megatron-core is not installed" not in session.run(*command, external=True, silent=True, success_codes=[1]):
        session.error("it does not say what is missing")
