"""The test matrix: `nox -s 'tests(release="0.18.2")'`, or all of it with scripts/test.sh.

A session is one release of megatron-core in an environment of its own. Its suites run one after the other, and what
came of each is left in .nox/results/ for ci/report.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests", "lint", "wheel", *(["replay"] if os.environ.get("MEGATRON_LM") else [])]

MATRIX = nox.project.load_toml("ci/matrix.toml")
RESULTS = Path(".nox", "results")
PLUGIN = "megatron_mtp_patches.rehearsal.pytest_plugin"
LAST_LINES = 60  # of each rank other than 0, where a suite fails

SUITES = {suite["name"]: suite for suite in MATRIX["suite"] if "checkout" not in suite or os.environ.get("MEGATRON_LM")}


def fits(release: dict) -> bool:
    return sys.version_info >= tuple(map(int, release["python"].split(".")))


@nox.session
@nox.parametrize("release", [release["version"] for release in MATRIX["release"] if fits(release)])
def tests(session: nox.Session, release: str) -> None:
    """All suites, or those named after --, on one release of megatron-core."""
    packages = [*MATRIX["packages"], f"megatron-core=={release}", "setuptools>=77"]
    session.install("-e", ".[demo,test]", *packages)
    chosen = session.posargs or [name for name, suite in SUITES.items() if suite.get("only", release) == release]
    unknown = set(chosen) - set(SUITES)
    if unknown:
        session.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    failed = [suite for suite in chosen if not run_suite(session, release, suite)]
    if failed:
        session.error(f"{release}: {', '.join(failed)} failed")


def run_suite(session: nox.Session, release: str, suite: str) -> bool:
    ranks = SUITES[suite].get("ranks", 1)
    rehearsal = ["-p", PLUGIN] if ranks > 1 else []
    folder = RESULTS / release
    folder.mkdir(parents=True, exist_ok=True)
    logs = folder / f"{suite} logs"
    launcher = ["python", "-m"]
    if ranks > 1:  # rank 0 speaks, what the others say is kept
        others = ",".join(f"{rank}:3" for rank in range(1, ranks))
        launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--log-dir", str(logs), "--redirects", others, "-m"]
    junit = folder / f"{suite}.xml"
    junit.unlink(missing_ok=True)
    start = time.monotonic()
    session.log(f"{release}: {suite}")
    command = [
        *launcher,
        "pytest",
        "-q",
        "-rs",
        "--timeout=300",
        f"--junitxml={junit}",
        *rehearsal,
        *SUITES[suite]["tests"],
    ]
    try:
        if "installs" in SUITES[suite]:
            session.install(*SUITES[suite]["installs"])
        session.run(*command, env={"OMP_NUM_THREADS": "1"} if ranks > 1 else {})
        passed = True
    except nox.command.CommandFailed:
        passed = False
    counts = count(junit) if junit.is_file() else {"passed": 0, "failed": 0, "skipped": 0}
    passed = passed and counts["passed"] > 0
    if not passed:  # a rank other than 0, or the process itself, may have failed
        counts["failed"] = max(1, counts["failed"])
        for log in sorted(logs.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            session.log("\n".join([f"the last lines of {log.relative_to(logs)}:", *lines[-LAST_LINES:]]))
    (folder / f"{suite}.json").write_text(json.dumps({**counts, "seconds": round(time.monotonic() - start)}))
    return passed


def count(junit: Path) -> dict[str, int]:
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    totals = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
    for suite in suites:
        for key in totals:
            totals[key] += int(suite.get(key, 0))
    failed = totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}


@nox.session
def replay(session: nox.Session) -> None:
    """Upstream's unit tests of the checkouts that MEGATRON_LM names, without and with the patches."""
    session.install("-e", ".[demo,test]", *MATRIX["packages"], "pytest-mock")
    for folder in os.environ["MEGATRON_LM"].split(":"):
        release = ["--release", "HEAD"] if Path(folder, ".git").exists() else []
        session.run("python", "scripts/replay_upstream.py", "--megatron", folder, *release, *session.posargs)


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
