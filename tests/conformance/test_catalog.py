"""No step of adding a patch is forgotten: the catalog, the fingerprints, the settings of ms-swift, the pages."""

from __future__ import annotations

import re
from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE, CATALOG, _declared_in
from megatron_mtp_patches.cli.places import read_guards
from megatron_mtp_patches.declarations.description import setting_texts
from megatron_mtp_patches.engine.fingerprints import ABSENT, KnownSources
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.megatrons.known import MEGATRONS, RELEASES

from scripts.common.toml import read_toml

pytestmark = pytest.mark.forked("python")

PACKAGE = Path(megatron_mtp_patches.__file__).parent
WRITTEN = ("patches/**/*.py", "megatron_overrides/**/*.py", "tests/**/*.py", "docs/*.md", "CHANGELOG.md")
ROOT = Path(__file__).resolve().parents[2]
KNOWN = KnownSources.read(Path(ENGINE.table_file))
# emerging-optimizers is none: its patch depends on nothing but names.
FRAMEWORKS = [patch for patch in CATALOG if patch.package and any(edit.check_source for edit in patch.edits)]


def test_every_declared_patch_is_in_the_catalog():
    declarations = [file for file in PACKAGE.glob("*/*.py") if "\nPATCH = " in file.read_text(encoding="utf-8")]
    topics = {file.parent for file in declarations} - {PACKAGE / "rehearsal"}  # which the command adds by itself
    files = [file for topic in topics for file in topic.glob("[!_]*.py") if not file.stem.endswith("defects")]
    assert {file.stem.replace("_", "-") for file in files} == {patch.id for patch in CATALOG}, (
        "catalog.py lists the patches"
    )


def test_a_listed_module_that_declares_no_patch_is_named():
    said = r"^megatron_mtp_patches\.declarations\.settings is listed .* give it PATCH = Patch\("
    with pytest.raises(ImportError, match=said):
        _declared_in("declarations.settings")


@pytest.mark.parametrize("patch", [*BASE, *CATALOG], ids=lambda patch: patch.id)
def test_the_source_of_every_target_is_known_in_every_release(patch):
    for edit in (edit for edit in patch.edits if edit.check_source):
        known = {release for releases in KNOWN.targets[edit.target].values() for release in releases}
        missing = set(KNOWN.package_releases(patch.package)) - known
        assert not patch.package or ABSENT not in KNOWN.targets[edit.target]
        assert not missing, f"{edit.target}: run megatron-mtp-patches drift --against FOLDER --accept RELEASE for these"


@pytest.fixture(scope="module")
def tested_requirements():
    """The requirements that the matrix pins, in lower case, and the TransformerEngine of each release."""
    matrix = read_toml(ROOT / "ci" / "matrix.toml")
    pinned = {word.lower() for one in matrix["environment"] for word in (*one["installs"], *one.get("alone", ()))}
    return pinned | {f"transformer-engine=={one['transformer_engine']}" for one in MEGATRONS}


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=lambda patch: patch.package)
def test_the_known_releases_of_a_framework_are_those_that_tests_run(patch, tested_requirements):
    name = patch.package.lower()
    releases = {release.lower().replace(" ", "==") for release in KNOWN.package_releases(patch.package)}
    assert releases and releases == {word for word in tested_requirements if word.startswith(f"{name}==")}


def test_the_changelog_names_every_patch():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = [patch.id for patch in CATALOG if f"`{patch.id}`" not in changelog]
    assert not missing, "CHANGELOG.md says in a line what each patch does and in which releases"


def test_the_page_that_says_what_to_turn_on_links_every_patch_with_a_flag():
    pages = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("which-patch", "frameworks")]
    linked = set(re.findall(r"\]\([\w.]*#([\w-]+)\)", "".join(pages)))
    missing = {patch.id for patch in CATALOG if setting_texts(patch)} - linked
    assert not missing, "docs/which-patch.md says what to turn on for what, docs/frameworks.md for a framework"


def test_each_patch_has_a_test_that_is_marked_with_it():
    guards, ids = read_guards(ROOT / "tests"), {patch.id for patch in CATALOG}
    assert guards.keys() - ids == set(), "a mark names what is no patch"
    assert ids - guards.keys() == set(), "mark a test that notices its lack with pytest.mark.guards(ID)"


@pytest.mark.parametrize("release", RELEASES)
def test_a_test_is_known_to_notice_each_edit(release):
    from scripts.noticed_edits import find_new_edits

    assert find_new_edits(release) == {}, "nox -s accept looks for the tests that notice these"


def test_marks_are_read_of_files_and_of_tests(tmp_path):
    file = tmp_path / "tests" / "norms" / "test_it.py"
    file.parent.mkdir(parents=True)
    marks = 'pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("one", "two")]\n'
    file.write_text(f'import absent\n{marks}\n@pytest.mark.guards("one")\ndef test_a(): ...\ndef test_b(): ...\n')
    it = "tests/norms/test_it.py"
    assert read_guards(tmp_path / "tests") == {"one": [it, f"{it}::test_a"], "two": [it]}


def test_nothing_is_left_to_say():
    """`nox -s new` marks what only a person can say."""
    files = (file for pattern in WRITTEN for file in ROOT.glob(pattern) if file != Path(__file__))
    lines = ((file, number, line) for file in files for number, line in enumerate(file.open(encoding="utf-8"), 1))
    left = [f"{file}:{number}: {line}" for file, number, line in lines if re.search("(?i)fill[ _]in", line)]
    assert not left, "\n".join(left)
