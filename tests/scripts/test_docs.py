"""README and docs/ say what is so: generated tables, flags, links."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAGS = {edit.flag for patch in CATALOG for edit in patch.edits if isinstance(edit, AddFlag)}
FIELDS = {edit.field for patch in CATALOG for edit in patch.edits if isinstance(edit, AddField)}


def docs(root, *arguments):
    return subprocess.run([sys.executable, root / "scripts" / "docs.py", *arguments], capture_output=True, text=True)


def test_generated_tables_are_what_the_declarations_say():
    done = docs(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_named_and_made_anew(tmp_path):
    for name in ("scripts", "patches", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    (tmp_path / "README.md").write_text(README.replace("| adds | adds | adds |", "| adds | native | adds |"))
    done = docs(tmp_path, "--check")
    assert (done.returncode, done.stdout) == (1, "README.md: out of date; run scripts/docs.py\n")
    assert docs(tmp_path).stdout == "README.md: made anew\n"
    assert (tmp_path / "README.md").read_text() == README


def test_readme_has_every_flag_and_no_other():
    """A configuration field is Megatron's flag of that name, too."""
    table = set(re.findall(r"^\| `(--[\w-]+)", README, re.MULTILINE))
    of_fields = {f"--{field.replace('_', '-')}" for field in FIELDS}
    assert table <= FLAGS | of_fields
    assert table >= FLAGS


def heading_anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in heading_anchors(there), target


def test_every_patch_has_its_page():
    assert {patch.id for patch in CATALOG} <= {page.stem for page in PAGES}
