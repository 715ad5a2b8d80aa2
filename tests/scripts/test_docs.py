"""README and docs/ say what is so: generated tables, flags, links."""

import re
import shutil
import sys

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.declarations.description import setting_texts
from megatron_mtp_patches.declarations.settings import Setting
from megatron_mtp_patches.engine import AddField, AddFlag
from megatron_mtp_patches.megatrons.known import DEFAULT, MAIN

from scripts.bench import startup
from scripts.docs import __main__ as generator
from scripts.docs import defects, kept
from tests.pages import PAGES, ROOT

pytestmark = pytest.mark.forked("torch")  # which the programs of the defects import
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FLAGS = {edit.flag for patch in CATALOG for edit in patch.edits if isinstance(edit, AddFlag)}
FIELDS = {
    edit.field
    for patch in CATALOG
    for edit in patch.edits
    if isinstance(edit, AddField) and (not patch.package or isinstance(edit.setting, Setting))
}


@pytest.fixture
def docs(monkeypatch, capsys):
    """docs(root, *words): (exit code, what is printed) of `python -m scripts.docs` on the pages in `root`."""

    def run(root, *words):
        monkeypatch.setattr(generator, "ROOT", root)
        monkeypatch.setattr(sys, "argv", ["scripts.docs", *words])
        return generator.main(), capsys.readouterr().out

    return run


def test_generated_tables_are_what_the_declarations_say(docs):
    assert docs(ROOT, "--check") == (0, "")


def test_a_stale_table_is_named_and_made_again_and_a_patch_without_its_lines_is_named(docs, tmp_path):
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    page = tmp_path / "docs" / "moe.md"
    current = page.read_text(encoding="utf-8")
    page.write_text(current.replace("applied, native from 0.18.2", "applied"))
    assert docs(tmp_path, "--check") == (1, "docs/moe.md: out of date; run python -m scripts.docs\n")
    assert docs(tmp_path) == (0, "docs/moe.md: made again\n")
    assert page.read_text(encoding="utf-8") == current
    (tmp_path / "docs/trainer.md").rename(tmp_path / "docs/others.md")
    norms = tmp_path / "docs/norms.md"
    norms.write_text(norms.read_text(encoding="utf-8").replace("## floor-clip-coefficient", "## Clipping"))
    code, said = docs(tmp_path, "--check")
    homeless = ["norms.md lacks, below `## floor-clip-coefficient`"]
    homeless += [
        f"trainer.md lacks, below `## {name}`"
        for name in ("freeze-all-layers", "log-first-step-once", "watch-invariants")
    ]
    assert (code, re.findall(r"^docs/(.*?), the lines", said, re.MULTILINE)) == (1, homeless)


def test_the_defects_that_readme_counts_add_up():
    numbers = map(int, re.findall(r"(?<![\d.])\d+(?!\.?\d)", defects.removed(DEFAULT)))
    known, reproduced, read, reported, removed, *states = numbers
    row = next(line for line in defects.by_release().splitlines() if line.startswith(f"| {DEFAULT} "))
    assert row.endswith(f"| {known} | {removed} |")
    assert known == reproduced + read + reported and removed == sum(states)
    assert len(states) == 3 and min(reproduced, read, reported, *states) > 0


def test_what_the_bench_found_in_a_sentence():
    def row(ranks, release, native, unpatched, itself):
        ratios = {"patched / native": native, "patched / unpatched": unpatched, "unpatched / native": itself}
        counts = {"native 0.19.2": {"all_reduces": 2 * ranks}, "patched": {"all_reduces": 1}}
        row = {"ranks": ranks, "release": release, "a step": counts, "misses": ["slow"] if native > 1.01 else []}
        return row | {pair: {"median": median} for pair, median in ratios.items()}

    rows = [row(2, "0.18.2", 1.00, 1.2, 0.5), row(1, "0.18.2", 0.95, 0.9, 0.5), row(1, "0.19.2", 1.02, 1.01, 0.99)]
    starts = [{"ms": 16.2, "apply s": 0.31}, {"ms": 24.8, "apply s": 0.2}]
    text = kept.cost({"step": rows, "import": starts})
    numbers = re.findall(r"\d+(?:\.\d+)?", text.replace("0.19.2", ""))
    assert numbers == "1 2 0.95 1.02 2 3 1.00 1 0.99 0.99 0.90 1.20 1 2 4 25 0.31".split()
    none_misses = [{**row, "misses": []} for row in rows]
    assert "3 of 3 rows meet the target, at most 1.00;" in kept.cost({"step": none_misses, "import": starts})


def test_the_page_of_costs_names_what_the_bench_holds_the_import_against():
    page = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    held = f"holds the import to under {startup.IMPORT_LIMIT:g} ms and `apply()` to under {startup.APPLY_LIMIT:g} s of"
    assert held in page


def test_the_reference_has_every_flag_and_field_once():
    """Megatron makes flags of the fields of TransformerConfig; others have the flag that is added, or none."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w.-]+)[^`]*`(?=<br>| \|)", "".join(re.findall(r"^\| `[^|]*\|", page, re.MULTILINE)))
    assert len(named) == len(set(named)) and set(named) >= FLAGS
    assert sorted(name.rpartition(".")[2] for name in named if "." in name) == sorted(FIELDS)


def test_the_reference_has_the_default_of_each_field():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"`\w+Config\.(\w+)[^`]*` \| ([^|]*) \|", page))
    edits = (edit for patch in CATALOG for edit in patch.edits)
    fields = {(edit.field, edit.default) for edit in edits if isinstance(edit, AddField) and edit.field in shown}
    words = {"off": False, "none": None, "field: True; the flag sets False": True}
    assert shown.keys() == FIELDS and True in dict(fields).values()
    for field, default in fields:
        text = shown[field]
        assert words.get(text, default) is default and (text in words or text == str(default)), field


def test_a_patch_that_no_setting_asks_for_says_what_it_changes():
    """It is listed in docs/patches.md: unless it is a repair, or changes numbers only where its settings are used."""
    named = {patch.id for patch in CATALOG if patch.unasked}
    asked = re.compile("Only with|Nothing changes without a flag")
    assert named == {patch.id for patch in CATALOG if not patch.is_repair and not asked.match(patch.numerics)}
    for patch in CATALOG:
        flags = {one.name.split()[0] for one in setting_texts(patch)}
        assert set(re.findall(r"--[\w-]+", patch.turned_off_by)) <= flags and patch.unasked or not patch.turned_off_by


def test_one_version():
    assert f"\nversion: {megatron_mtp_patches.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {megatron_mtp_patches.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_patches_names_the_commit_of_main():
    assert f"(commit {MAIN})" in (ROOT / "docs/patches.md").read_text(encoding="utf-8")


def heading_anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_no_two_headings_of_a_page_have_one_anchor():
    """GitHub and the site number the second one in different ways."""
    repeated = {page.name: set(anchors) for page in PAGES if len(set(anchors := heading_anchors(page))) < len(anchors)}
    assert not repeated


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in heading_anchors(there), target
