"""`nox -s new` writes files that can be imported, have the style of the others, and are not done."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest

from scripts import new
from tests.pages import ROOT

PATCH = {
    "patches/megatron_mtp_patches/parallelism/mend_it.py",
    "megatron_overrides/parallelism/mend_it.py",
    "tests/megatron_overrides/parallelism/test_mend_it.py",
    "patches/megatron_mtp_patches/norms/floor_it.py",
    "megatron_overrides/norms/zeros/here.py",
    "tests/megatron_overrides/norms/zeros/test_here.py",
    "CHANGELOG.md",
}
DEFECTS = {
    f"patches/megatron_mtp_patches/{file}"
    for file in (
        "data/defects.py",
        "data/programs/ml_1b.py",
        "frameworks/more_defects.py",
        "frameworks/programs/it_is_wrong.py",
    )
}
CHECK = """
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli.places import places_of
from megatron_mtp_patches.defects.catalog import known_defects
ids = [patch.id for patch in CATALOG]
print(ids[ids.index("mend-it") - 1], places_of(CATALOG[ids.index("mend-it")]))
print({one.id: (one.links, one.state, places_of(one)["programs"]) for one in known_defects() if "FILL" in one.when})
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    for name in ("patches", "megatron_overrides", "docs", "scripts", "tests/conformance"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    for words in (
        "patch mend-it parallelism",
        "patch floor-it norms zeros.here",
        "defect ML-1b data",
        "defect it-is-wrong frameworks more_defects",
    ):
        run(root, "-m", "scripts.new", *words.split()).check_returncode()
    return root


def run(root, *words):
    env = {**os.environ, "PYTHONPATH": f"{root}/patches:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True)


def test_what_is_left_to_say_is_named(repository):
    done = run(repository, "-m", "pytest", "-q", "tests/conformance/test_catalog.py", "-k", "left_to_say or changelog")
    named = re.findall(rf"^E +(?:AssertionError: )?{repository}/(\S+?):\d+: ", done.stdout, re.MULTILINE)
    assert set(named) == PATCH | DEFECTS and "1 failed, 1 passed" in done.stdout


def test_the_package_knows_them(repository):
    done = run(repository, "-c", CHECK)
    patch, defects = done.stdout.splitlines()
    before, _, places = patch.partition(" ")
    assert before == "order-param-groups-alike"
    assert eval(places) == {
        "defects": [],
        "declaration": ["patches/megatron_mtp_patches/parallelism/mend_it.py"],
        "programs": [],
        "overrides": ["megatron_overrides.parallelism.mend_it"],
        "tests": ["tests/megatron_overrides/parallelism/test_mend_it.py::test_fill{}in".format("_")],
        "page": ["docs/parallelism.md#mend-it"],
    }
    programs = "patches/megatron_mtp_patches/{}/programs/{}.py".format
    assert eval(defects) == {
        "ML-1b": (("NVIDIA/Megatron-LM#1",), "open", [programs("data", "ml_1b")]),
        "it-is-wrong": ((), "unreported", [programs("frameworks", "it_is_wrong")]),
    }
    page, before = ((root / "docs" / "parallelism.md").read_text(encoding="utf-8") for root in (repository, ROOT))
    block = "<!-- made by python -m scripts.docs: mend-it -->\n<!-- end -->\n"
    assert page == f"{before}\n## mend-it\n\n{block}"
    assert (repository / "patches/megatron_mtp_patches/frameworks/programs/__init__.py").is_file()


def test_they_have_the_style_of_the_others(repository):
    ruff = shutil.which("ruff", path=f"{os.environ['PATH']}:{ROOT}/.nox/lint/bin")
    if ruff is None:
        pytest.skip("ruff is not installed")
    files = sorted({*PATCH, *DEFECTS, "patches/megatron_mtp_patches/catalog.py"} - {"CHANGELOG.md"})
    for words in (["check"], ["format", "--diff"]):
        done = subprocess.run([ruff, *words, *files], cwd=repository, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("patch detach-mtp-heads mtp", "detach-mtp-heads exists: megatron-mtp-patches explain detach-mtp-heads"),
        ("defect ML-4103B data", "ML-4103B exists"),
        ("patch ml-7513 data", "ml-7513 exists"),
        ("patch mend-more engine", "there is no topic 'engine'; there are attention, data, frameworks"),
        ("patch Mend-it mtp", "'Mend-it' is no id: write words with dashes"),
        ("defect mend_it mtp", "'mend_it' is no id"),
        ("defect mend-more mtp heads", "'heads' declares no defects"),
    ],
)
def test_what_exists_or_has_no_place_is_refused(repository, refused, words, said):
    assert said in refused(partial(new.main, repository), *words.split())
