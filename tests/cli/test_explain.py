"""`explain`: what a patch does and where it stands on the installed Megatron, or which code changes a function."""

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.declarations.description import setting_texts
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.megatron_engine import ENGINE
from megatron_mtp_patches.megatrons.origins import describe_retirement
from megatron_mtp_patches.reproductions.runner import has_program

from tests.conformance.expected import STATE

pytestmark = pytest.mark.forked("patched")


@pytest.mark.parametrize("name", ["GPTModel._postprocess", "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"])
def test_explain_names_the_code_that_changes_a_function(command, name):
    done = command("explain", name)
    words = done.out.replace("\n", "")
    assert done.code == 0 and "train-mtp-heads-for-acceptance" in words
    assert "megatron_overrides.mtp.losses.postprocess:call_process_mtp_loss" in "".join(words.split())
    assert "ChainedOptimizer" not in words


# The first patch of each state and of each set of kinds of edits.
CHOSEN = {(STATE[patch.id], frozenset(map(type, patch.edits))): patch for patch in reversed(CATALOG)}


@pytest.mark.parametrize("patch", CHOSEN.values(), ids=lambda patch: patch.id)
def test_explain_shows_what_the_declaration_says_links_state_and_edits(command, release, patch):
    done = command("explain", patch.id)
    assert done.code == 0
    (told,) = [report for report in megatron_mtp_patches.status() if report.id == patch.id]
    words = " ".join(done.out.split())
    assert patch.summary in words
    for text in (patch.problem, *patch.adds, *patch.repairs, *patch.refuses, patch.numerics, *patch.notes):
        assert text and text in words
    assert patch.unasked in words and patch.turned_off_by in words
    for setting in setting_texts(patch):
        assert f"{setting.name} │ {setting.default} │ {setting.effect}" in words
    assert f"{told.state}: {told.reason}" in done.out
    for change in patch.upstream:
        assert f"{change} {ENGINE.project.pull_request_url(change)} ({change.fate})" in done.out
    assert f"Retire when: {describe_retirement(patch, '{}'.format)}.\n" in done.out
    for edit in patch.edits:
        rows = [line for line in done.out.splitlines() if edit.target in line and type(edit).__name__ in line]
        assert rows and all(told.targets[edit.target] in row for row in rows)
    assert "unknown" not in done.out and release in done.out


@pytest.mark.parametrize("name", ["ML-5047", "ML-5236", "ML-7513"])
def test_explain_says_what_a_known_defect_is_and_what_removes_it(command, name):
    defect = next(one for one in known_defects() if one.id == name)
    done = command("explain", name)
    assert done.code == 0 and defect.effect in done.out and defect.when in done.out
    assert ("No patch removes it" in done.out) is (not defect.patch)
    assert f"megatron-mtp-patches explain {defect.patch}`" in done.out or not defect.patch
    assert ("it has this defect" in done.out) is bool(has_defect(defect))
    assert (f"reproduce {name}`" in done.out) is has_program(name)
    assert (f"export --diff {name}`" in done.out) is bool(defect.diff)


def lines_of_places(done):
    """{kind of place: what stands after it}, from the end of what `explain` printed."""
    return dict(line.split(maxsplit=1) for line in done.out.rpartition("\n\n")[2].splitlines())


def test_an_id_leads_to_all_that_belongs_to_it(command, monkeypatch):
    attention = "patches/megatron_mtp_patches/attention"
    patch, defect = (lines_of_places(command("explain", name)) for name in ("scale-sparse-indexer-loss", "ML-4070"))
    assert patch.pop("defects") == "ML-4070" and defect.pop("patch") == "scale-sparse-indexer-loss"
    assert patch.pop("declaration") == f"{attention}/scale_sparse_indexer_loss.py"
    assert defect.pop("declaration") == f"{attention}/sparse_defects.py"
    assert (
        patch
        == defect
        == {
            "programs": f"{attention}/programs/ml_4070.py",
            "overrides": "megatron_overrides.attention.indexer_loss",
            "tests": "tests/reproductions/test_programs.py",
            "page": "docs/attention.md#scale-sparse-indexer-loss",
        }
    )
    monkeypatch.setattr("megatron_mtp_patches.cli.places.IS_CLONE", False)  # installed from a wheel
    installed = lines_of_places(command("explain", "ML-4070"))
    assert installed.keys() == defect.keys() - {"tests"} | {"patch", "declaration"}
    assert installed["declaration"] == "megatron_mtp_patches/attention/sparse_defects.py"


def test_a_defect_without_a_patch_leads_to_the_page_of_defects(command):
    (defect, *_) = [one for one in known_defects() if not one.patch and not has_program(one.id)]
    places = lines_of_places(command("explain", defect.id))
    assert places.keys() == {"declaration", "page"} and places["page"] == "docs/known-defects.md"
