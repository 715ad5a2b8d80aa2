"""One class for every patch, on whichever release is installed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import Export, Replace
from megatron_mtp_patches.engine.fingerprints import ABSENT, fingerprint, is_checked
from megatron_mtp_patches.engine.source import find_definition, find_file, parse

# Of the patch of a package that need not be there.
EMERGING = "applied" if find_file("emerging_optimizers") else "pending"
# What becomes of each patch in each release.
EXPECTED = {
    "0.16.1": {
        "skip-update-on-large-grad-norm": "applied",
        "scale-mtp-loss-separately": "applied",
        "derive-mtp-labels": "applied",
        "mtp-acceptance-rate": "applied",
        "detach-mtp-heads": "applied",
        "clip-mtp-grads-separately": "applied",
        "tag-mtp-stage-embedding": "applied",
        "exempt-muon-from-clipping": "applied",
        "floor-clip-coefficient": "applied",
        "keep-newton-schulz-scale-invariant": EMERGING,
        "fsdp-without-master-weights": "applied",
    },
    "0.17.1": {
        "skip-update-on-large-grad-norm": "applied",
        "scale-mtp-loss-separately": "applied",
        "derive-mtp-labels": "applied",
        "mtp-acceptance-rate": "applied",
        "detach-mtp-heads": "applied",
        "clip-mtp-grads-separately": "applied",
        "tag-mtp-stage-embedding": "applied",
        "exempt-muon-from-clipping": "applied",
        "floor-clip-coefficient": "applied",
        "keep-newton-schulz-scale-invariant": EMERGING,
        "fsdp-without-master-weights": "applied",
    },
    "0.18.2": {
        "skip-update-on-large-grad-norm": "repaired",
        "scale-mtp-loss-separately": "applied",
        "derive-mtp-labels": "applied",
        "mtp-acceptance-rate": "applied",
        "detach-mtp-heads": "applied",
        "clip-mtp-grads-separately": "applied",
        "tag-mtp-stage-embedding": "native",
        "exempt-muon-from-clipping": "applied",
        "floor-clip-coefficient": "applied",
        "keep-newton-schulz-scale-invariant": EMERGING,
        "fsdp-without-master-weights": "repaired",
    },
    "0.19.2": {
        "skip-update-on-large-grad-norm": "repaired",
        "scale-mtp-loss-separately": "native",
        "derive-mtp-labels": "repaired",
        "mtp-acceptance-rate": "repaired",
        "detach-mtp-heads": "repaired",
        "clip-mtp-grads-separately": "repaired",
        "tag-mtp-stage-embedding": "native",
        "exempt-muon-from-clipping": "applied",
        "floor-clip-coefficient": "applied",
        "keep-newton-schulz-scale-invariant": EMERGING,
        "fsdp-without-master-weights": "repaired",
    },
}
STAND_INS = Path(__file__).parents[1] / "stand_ins"
VERDICTS = {"applied": "add", "pending": "add", "repaired": "repair", "native": "native"}
WORDS = {"add": "adds", "repair": "repairs", "native": "native"}
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
IDS = [patch.id for patch in CATALOG]
MODULES = list(dict.fromkeys(module for patch in (*BASE, *CATALOG) for module in patch.modules))
# Each checked target that is here, once.
EDITS = list({e.target: e for p in CATALOG for e in p.edits if is_checked(e) and fingerprint(e) != ABSENT}.values())


@pytest.fixture
def patch(request):
    return next(patch for patch in CATALOG if patch.id == request.param)


@pytest.fixture
def expected(patch, release):
    return EXPECTED[release][patch.id]


def change_line(name):
    """A change of source: one more statement in the function (a decorator more for a class)."""

    def change(source):
        node = find_definition(ast.parse(source), name)
        lines = source.splitlines()
        if isinstance(node, ast.ClassDef):
            position, text = node.lineno - 1, " " * node.col_offset + "@(lambda cls: cls)"
        else:
            position, text = node.body[0].lineno - 1, " " * node.body[0].col_offset + "assert True"
        return "\n".join([*lines[:position], text, *lines[position:]]) + "\n"

    return change


def change_comments(*names):
    """A change that does not count: comments, a docstring and layout."""

    def change(source):
        for name in names:
            node = find_definition(ast.parse(source), name)
            lines = source.splitlines()
            first = node.body[0]
            docstring = " " * first.col_offset + '"""Another docstring."""'
            lines[first.lineno - 1 : first.lineno - 1] = ["", " " * first.col_offset + "# another comment", docstring]
            source = "\n".join(lines) + "\n"
        return source

    return change


@pytest.fixture(scope="module")
def drifting(release):
    """The checked edit that gets a changed line when Megatron is really imported."""
    return next(edit for edit in EDITS if edit.target.endswith("ChainedOptimizer.step"))


@pytest.fixture(scope="module")
def outcomes(start_all, shadow, drifting):
    """What the processes that import Megatron report, by scenario."""
    names = {}
    for edit in EDITS:
        names.setdefault(edit.module, []).append(edit.name)
    others = {module: change_comments(*names[module]) for module in names if module != drifting.module}
    checkout = shadow({drifting.module: change_line(drifting.name), **others})
    return start_all(
        before_megatron=([], ()),
        after_megatron=([",".join(module for module in MODULES if find_file(module))], ()),
        with_transformer_engine=([], (str(STAND_INS),)),
        with_apex=([], (str(STAND_INS),)),
        drifted=([drifting.module], (str(checkout),)),
    )


@pytest.fixture(scope="module")
def verdicts(start_all, shadow):
    """The verdicts on the installed Megatron with one change, {(target, kind): {patch: (verdict, reason)}}."""
    makers = {"line": change_line, "comments": change_comments}
    folders = {(e.target, kind): str(shadow({e.module: make(e.name)})) for e in EDITS for kind, make in makers.items()}
    report = start_all(judge_sources=([",".join(folders.values())], ()))["judge_sources"]
    assert report["imported"] == []
    return {key: report["verdicts"][folder] for key, folder in folders.items()}


@pytest.mark.parametrize("patch", IDS, indirect=True)
class TestPatch:
    def test_it_waits_for_megatron(self, patch, expected, outcomes):
        waiting = "native" if expected == "native" else "pending"
        assert outcomes["before_megatron"]["pending"][patch.id] == waiting

    @pytest.mark.parametrize("scenario", ["before_megatron", "after_megatron"])
    @pytest.mark.parametrize("time", ["found", "again"])
    def test_it_is_in_force_once(self, patch, expected, outcomes, scenario, time):
        """Imported before or after Megatron; applied a second time; reverted and applied."""
        found = outcomes[scenario][time][patch.id]
        assert found["state"] == expected
        installed = 1 if expected in ("applied", "repaired") else 0
        others = {f"{type(e).__name__} {e.target}" for p in CATALOG if p is not patch for e in p.edits}
        shared = others if expected == "native" else set()  # in force for the sake of another patch
        here = [n for edit, n in found["counts"].items() if n not in (None, "native") and edit not in shared]
        assert set(here) == ({installed} if expected != "pending" else set())
        absent = {edit.split(" ")[1] for edit, count in found["counts"].items() if count is None}
        for target, told in found["targets"].items():
            if expected == "native":
                assert told == "untouched"
            else:
                assert told == ("not in this Megatron" if target in absent else "applied")

    def test_the_readme_says_so(self, patch, expected, release):
        rows = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| ")]
        header = next(row for row in rows if row[0] == "patch")
        row = next(row for row in rows if row[0].startswith(f"[`{patch.id}`]"))
        assert row[header.index(release)] == WORDS[VERDICTS[expected]]

    def test_what_is_absent_is_absent_in_the_source(self, patch, outcomes):
        counts = outcomes["after_megatron"]["found"][patch.id]["counts"]
        exported = {edit.target for edit in patch.edits if isinstance(edit, Export)}
        for edit in patch.edits:
            if isinstance(edit, Replace) and edit.target in exported:
                continue  # absent in the source and there all the same
            tree = parse(edit.module)
            owner = edit.name.rpartition(".")[0] if isinstance(edit, Export) else edit.name
            has = tree is not None and (not owner or find_definition(tree, owner) is not None)
            found = [count for key, count in counts.items() if key.split(" ")[:2] == [type(edit).__name__, edit.target]]
            assert found and all((count is not None) == has for count in found)

    def test_revert_disables_it(self, patch, outcomes):
        assert outcomes["after_megatron"]["reverted"][patch.id] == "disabled"

    def test_every_checked_target_of_it_refuses_a_changed_line(self, patch, expected, verdicts):
        for edit in (edit for edit in EDITS if edit in patch.edits):
            verdict, reason = verdicts[edit.target, "line"][patch.id]
            if expected == "native":
                assert verdict == "native"
                continue
            assert verdict == "refused", edit.target
            path = edit.module.replace(".", "/")
            assert edit.target in reason and (f"{path}.py" in reason or f"{path}/__init__.py" in reason)

    def test_no_checked_target_of_it_minds_comments_docstrings_and_layout(self, patch, expected, verdicts):
        for edit in (edit for edit in EDITS if edit in patch.edits):
            assert verdicts[edit.target, "comments"][patch.id][0] == VERDICTS[expected], edit.target

    def test_in_an_unknown_megatron_it_is_left_out_only_if_it_needs_the_unknown_part(
        self, patch, expected, drifting, outcomes
    ):
        found = outcomes["drifted"]["found"][patch.id]
        needs = drifting in patch.edits and expected != "native"
        assert found["state"] == ("refused" if needs else expected)
        assert set(found["counts"].values()) <= {0, 1, None, "native"}
        if needs:
            assert found["counts"][f"Replace {drifting.target}"] == 0


def test_the_table_lists_every_patch_and_this_release(release):
    assert list(EXPECTED[release]) == IDS


def test_importing_the_package_imports_no_megatron(outcomes):
    assert outcomes["before_megatron"]["loaded"] == []


def test_whichever_is_imported_first_the_result_is_the_same(outcomes):
    assert outcomes["before_megatron"]["found"] == outcomes["after_megatron"]["found"]


@pytest.mark.parametrize(
    "scenario, taken",
    [
        ("with_transformer_engine", {"Adam": "transformer_engine.pytorch.optimizers", "TE": True, "Apex": True}),
        ("with_apex", {"Adam": "apex.optimizers", "TE": False, "Apex": True}),
    ],
)
def test_transformer_engine_and_apex_make_no_difference_to_what_is_applied(outcomes, scenario, taken):
    """Stand-ins of them; the others of these tests have neither."""
    assert outcomes[scenario] == {"found": outcomes["before_megatron"]["found"], "taken": taken}


def test_names_that_users_took_by_value_follow(outcomes):
    """A function that frameworks import, replaced or wrapped, is the new one to them; they keep their classes."""
    after = outcomes["after_megatron"]
    assert after["stale"] == []
    assert {"clip_qk", "roll_tensor"} <= set(after["followed"])
    assert not [name for name in after["followed"] if name[0].isupper()]


def test_none_leaves_megatron_untouched(outcomes):
    after = outcomes["after_megatron"]
    assert after["none_states"] == ["disabled"]
    base = [edit.target for patch in BASE for edit in patch.edits if find_file(edit.module)]
    assert after["base"] == sorted(base), "what makes the ranks agree on none"
    names = {target.rpartition(":")[2] for target in base}
    assert {name.rpartition(":")[2] for name in after["under_none"]} == names
    assert after["after_none"] == []


def test_revert_puts_every_original_back(outcomes):
    after = outcomes["after_megatron"]
    assert "ChainedOptimizer.step" in after["changed"]
    assert after["left"] == after["left_again"] == []


def test_an_unknown_source_is_refused_at_every_import(outcomes, drifting):
    errors = outcomes["drifted"]["errors"]
    assert len(errors) == 2
    for error in errors:
        assert "is refused" in error and drifting.target in error and "checkout" in error and "nearest: " in error
        assert "MEGATRON_MTP_PATCHES=-" in error and "MEGATRON_MTP_PATCHES_ON_DRIFT=warn" in error
    assert outcomes["drifted"]["file"] is None, "the refused module is not imported"


def test_warn_names_the_refused_patches_once(outcomes, release, drifting):
    warned = outcomes["drifted"]["warned"]
    refused = [patch.id for patch in CATALOG if drifting in patch.edits]
    assert [sum(f"{name} is refused" in warning for warning in warned) for name in refused] == [1] * len(refused)
    assert len(warned) == len(refused)


def test_the_record_is_in_megatron_s_arguments(outcomes):
    recorded = outcomes["before_megatron"]["recorded"]
    if find_file("megatron.training.arguments") is None:
        assert recorded is None
        return
    in_arguments, record = recorded
    assert in_arguments == record
    assert all(f"{name}=" in record for name in IDS)
