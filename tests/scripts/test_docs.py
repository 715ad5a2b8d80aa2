"""README and docs/ say what is so: generated tables, flags, links."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag
from megatron_mtp_patches.megatrons import MAIN, RELEASES

from scripts.bench import startup
from scripts.docs import kept

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAGS = {edit.flag for patch in CATALOG for edit in patch.edits if isinstance(edit, AddFlag)}
KEPT = ("acceptance", "bench", "experts", "frozen", "starts")  # the tables that pages quote
OF_MEGATRON = [patch for patch in CATALOG if not patch.package]
FIELDS = {edit.field for patch in OF_MEGATRON for edit in patch.edits if isinstance(edit, AddField)}


def docs(root, *arguments):
    command, env = (
        [sys.executable, "-m", "scripts.docs", *arguments],
        {**os.environ, "PYTHONPATH": f"{root}/patches:{root}"},
    )
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_generated_tables_are_what_the_declarations_say():
    done = docs(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_named_and_made_again(tmp_path):
    for name in ("scripts", "patches", "docs", *(f"ci/{table}" for table in KEPT)):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("pins.toml", "pins.json"):
        shutil.copy(ROOT / "ci" / name, tmp_path / "ci")
    (tmp_path / "README.md").write_text(README)
    page = tmp_path / "docs" / "patches.md"
    current = page.read_text(encoding="utf-8")
    page.write_text(current.replace("| applied | applied | applied |", "| applied | native | applied |"))
    done = docs(tmp_path, "--check")
    assert (done.returncode, done.stdout) == (1, "docs/patches.md: out of date; run python -m scripts.docs\n")
    assert docs(tmp_path).stdout == "docs/patches.md: made again\n"
    assert page.read_text(encoding="utf-8") == current


def test_bytes_are_those_that_were_measured(tmp_path):
    """By a Python that writes what it is told; the real measurement takes 0.17.1."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("patches", "ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    page.write_text("<!-- made by python -m scripts.docs --memory: memory -->\nold\n<!-- end -->\n")
    (tmp_path / "README.md").write_text(README)

    def measure(state):
        held = {"parameters": 10, "gradients": 20, "main_weights": 2000}
        without = {"held": {**held, "optimizer_state": 3000}, "note": "it stands still"}
        patched = {"held": {**held, "optimizer_state": state}, "saves": {"optimizer_state": 990}, "note": "it learns"}
        found = json.dumps({"fsdp-without-master-weights": {"without": [without], "with": [patched]}})
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '{found}' > $7\n")
        python.chmod(0o755)
        return docs(tmp_path, "--memory", python)

    assert measure(2000).stdout.splitlines()[-1] == "docs/page.md: made again"
    text = page.read_text()
    assert "| gradients (fp32) | 20 | 20 |  |" in text and "old" not in text
    assert "| FusedAdam's state | 3,000 | 2,000 | 3,000 - 990 = 2,010 |" in text
    assert "| the three steps | it stands still | it learns |  |" in text
    assert docs(tmp_path, "--memory", tmp_path / "none").returncode == 2
    (tmp_path / "python").write_text("#!/bin/sh\nexit 2\n")
    done = docs(tmp_path, "--memory", tmp_path / "python")
    assert done.returncode == 1 and "failed (exit code 2)" in done.stderr and "Traceback" not in done.stderr
    done = measure(3000)
    assert done.returncode == 1 and "give one with 0.16.1 or 0.17.1" in done.stderr
    assert page.read_text() == text


def test_what_the_bench_found_in_a_sentence():
    def row(ranks, release, native, unpatched, itself):
        ratios = {"patched / native": native, "patched / unpatched": unpatched, "unpatched / native": itself}
        counts = {"native 0.19.2": {"all_reduces": 2 * ranks}, "patched": {"all_reduces": 1}}
        here = {"ranks": ranks, "release": release, "a step": counts, "misses": ["slow"] if native > 1.01 else []}
        return here | {of: {"median": median} for of, median in ratios.items()}

    rows = [row(2, "0.18.2", 1.00, 1.2, 0.5), row(1, "0.18.2", 0.95, 0.9, 0.5), row(1, "0.19.2", 1.02, 1.01, 0.99)]
    text = kept.cost({"step": rows, "import": [{"ms": 16.2, "apply s": 0.31}, {"ms": 24.8, "apply s": 0.2}]})
    assert "On 1, 2 CPU ranks optimizer.step takes 0.95 to 1.02 of native 0.19.2's time" in text
    assert (
        "2 of 3 rows meet the target" in text
        and "started twice, takes 0.99 to 0.99 of the time of its first run" in text
    )
    assert "0.90 to 1.20 of the time of the same release unpatched" in text
    assert "All-reduces in a step: 1; native has 2 or 4.\nThe import takes 25 ms of CPU time, " in text
    assert "apply() 0.31 s on each rank once Megatron is imported." in text


def test_the_guarantees_promise_what_the_bench_holds_the_import_against():
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    promise = page.partition("**It costs nothing before it is needed.**")[2].partition("\n* ")[0]
    assert f"takes under {startup.IMPORT_LIMIT:g} ms" in promise
    assert f"under {startup.APPLY_LIMIT:g} s of CPU time" in promise


def test_the_reference_has_every_flag_and_field_once():
    """Megatron makes flags of the fields of TransformerConfig; others have the flag that is added, or none."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w.-]+)[^`]*`(?=<br>| \|)", "".join(re.findall(r"^\| `[^|]*\|", page, re.MULTILINE)))
    assert len(named) == len(set(named)) and set(named) >= FLAGS
    assert sorted(name.rpartition(".")[2] for name in named if "." in name) == sorted(FIELDS)


def test_the_reference_says_whose_a_flag_is():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    whose = dict(re.findall(r"^\| `(--[\w-]+).* \| (\S+) \|$", page, re.MULTILINE))
    assert {flag for flag, owner in whose.items() if owner == "ours"} >= FLAGS
    assert whose["--mtp-detach-heads"] == "upstream's"


def test_one_version():
    assert f"\nversion: {megatron_mtp_patches.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {megatron_mtp_patches.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_contributing_accepts_the_releases_of_the_matrix_and_the_main_of_the_pages():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    installed, accepted = (found.split() for found in re.findall(r"for release in (.*); do", contributing))
    assert (installed, accepted) == ([*RELEASES], [*RELEASES[1:], "main"])
    assert f"/main checkout {MAIN}\n" in contributing
    assert f"(commit {MAIN})" in (ROOT / "docs/patches.md").read_text(encoding="utf-8")


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


def test_a_patch_without_a_page_or_without_its_lines_there_is_named(tmp_path):
    for name in ("patches", "ci", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("scripts", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs/detach-mtp-heads.md").unlink()
    (tmp_path / "docs/floor-clip-coefficient.md").write_text("# Without lines\n")
    done = docs(tmp_path, "--check")
    assert done.returncode == 1
    assert re.findall(r"them in docs/(.*)\.md, below the title", done.stdout) == [
        "detach-mtp-heads",
        "floor-clip-coefficient",
    ]


def test_every_patch_has_its_page():
    missing = {patch.id for patch in CATALOG} - {page.stem for page in PAGES}
    assert not missing, "create docs/<id>.md; CONTRIBUTING.md says what it begins with"
