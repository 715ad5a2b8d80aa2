"""python -m scripts.parity_scores: a mutant is what runs, and what came of each row is counted."""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.engine.source import find_file

from scripts.parity_scores import listed, table
from scripts.parity_scores.mutant import check_import, make_mutant, mutate
from scripts.parity_scores.outcomes import describe, is_decided
from scripts.parity_scores.table import Score, make_block, read_scores, write_scores

pytestmark = pytest.mark.forked("python")
PACKAGES = {"megatron": "checkout/megatron/core", "transformer_engine": "site/transformer_engine/core"}


@pytest.fixture
def sources(tmp_path):
    """A checkout and a site-packages."""
    for folder in PACKAGES.values():
        for name in ("a", "b", "__init__"):
            file = tmp_path / folder / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("" if name == "__init__" else f"{name} = [1, 1]\n")
        (tmp_path / folder / "__pycache__").mkdir()
        (tmp_path / folder / "__pycache__" / "a.cpython-312.pyc").touch()
    (tmp_path / "checkout" / "pretrain_gpt.py").touch()
    (tmp_path / "site" / "transformer_engine" / "__init__.py").touch()  # megatron is a namespace package
    return tmp_path


@pytest.mark.parametrize("package", PACKAGES)
def test_the_mutated_file_is_what_a_run_imports(sources, package, monkeypatch):
    root, untouched = sources / "mutant", sources / PACKAGES[package]
    row = {"file": f"{package}/core/a.py", "old": "1", "new": "2", "occurrence": 2}
    file = make_mutant(row, sources / "checkout", sources / "site", root)
    assert file.read_text() == "a = [1, 2]\n" and (untouched / "a.py").read_text() == "a = [1, 1]\n"
    assert not list(file.parent.glob("__pycache__/*")) and list(untouched.glob("__pycache__/*"))
    assert (file.parent / "b.py").resolve() == untouched / "b.py"
    script = (root / "pretrain_gpt.py").resolve()
    assert script.parent == root  # from which Python imports
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(script.parent)
    check_import(file, root)
    monkeypatch.syspath_prepend(untouched.parents[1])
    monkeypatch.delitem(sys.modules, f"{package}.core")
    monkeypatch.delitem(sys.modules, package)
    with pytest.raises(SystemExit, match=f"{package}.core.a is .*, not "):
        check_import(file, root)


@pytest.mark.parametrize("old, occurrence", [("3", None), ("1", None), ("1", 3)])
def test_a_text_that_is_not_there_or_is_there_twice_is_no_mutant(old, occurrence):
    with pytest.raises(ValueError, match="times in the file"):
        mutate("[1, 1]", old, "2", occurrence)


def test_what_mutants_replace_is_in_the_sources():
    file = find_file("megatron.core")
    release = metadata.version("megatron-core") if file else ""
    if release not in listed.MUTATED:
        pytest.skip("no mutant is of this Megatron")
    named = [row["name"] for row in listed.read_rows("mutants", release)]
    for row in listed.read_rows("mutants", release, [*named, "router-gradient-not-summed"]):
        if (source := file.parents[2] / row["file"]).is_file():
            mutate(source.read_text(encoding="utf-8"), row["old"], row["new"], row.get("occurrence"))


def finding(*patches, found=True):
    """The result of a cut with a finding that known defects with these patches explain."""
    deviation = SimpleNamespace(kind="gradient", name="weight", step=1, size=0.5)
    defects = [SimpleNamespace(id=f"by {patch}", patch=patch) for patch in patches]
    explanations = [SimpleNamespace(defect=defect) for defect in defects]
    result = SimpleNamespace(cut=SimpleNamespace(name="TP2"), verdict=1, findings=[deviation] * found, refusal="")
    return SimpleNamespace(**vars(result), explanations=explanations, not_told_apart=[])


EQUAL = finding(found=False)
BESIDE = SimpleNamespace(**vars(EQUAL) | {"not_told_apart": [SimpleNamespace(id="by repair")]})
REFUSED = SimpleNamespace(**vars(EQUAL) | {"cut": SimpleNamespace(name="PP2"), "verdict": None, "refusal": "no"})


@pytest.mark.parametrize(
    "patches, is_mutant, results, outcome",
    [
        ("none", False, [EQUAL, finding("x", "repair")], "named"),
        ("none", False, [finding("x")], "found"),
        ("none", False, [BESIDE, finding("x")], "found"),
        ("none", False, [EQUAL, BESIDE], "not told apart"),
        ("none", False, [EQUAL, REFUSED], "not found"),
        ("none", False, [REFUSED], "not trained"),
        ("all", False, [EQUAL], "clean"),
        ("all", False, [finding(None)], "clean"),
        ("all", False, [EQUAL, finding(None, "x")], "not clean"),
        ("all", False, [finding()], "not clean"),
        ("none", True, [EQUAL, finding()], "noticed"),
        ("none", True, [EQUAL], "not noticed"),
    ],
)
def test_outcomes(patches, is_mutant, results, outcome):
    score = describe({"name": "by repair"}, "1", patches, is_mutant, results, "", 1.2)
    assert score.outcome == outcome
    assert score.refused == {one.cut.name: "no" for one in results if one is REFUSED}
    is_wanted = outcome in ("named", "noticed")
    assert is_decided({"name": "by repair"}, patches, is_mutant, results) is is_wanted
    assert describe({"name": "a"}, "1", patches, is_mutant, results, "Error", 1.2).outcome == "not trained"


def test_counts_and_reasons(tmp_path, monkeypatch):
    def score(release, name, outcome, patches="none", kind="known"):
        return Score(kind, release, name, patches, outcome, [], {}, "", 1)

    rows = [
        score("2", "m", "noticed", kind="mutants"),
        score("1", "a", "found"),
        score("1", "b", "found"),
        score("1", "a", "clean", "all"),
    ]
    rows += [score("1", "a", "named")]
    write_scores(rows, tmp_path / "scores.json")
    reasons = [{"name": "a"}, {"name": "b", "not_named": "its kernel is missing"}]
    monkeypatch.setattr(table, "read_rows", lambda name, release: reasons)
    lines = make_block([*reversed(read_scores(tmp_path / "scores.json"))]).splitlines()
    assert lines[2:] == [
        "| 1 | 1 of 2 | 1 of 1 | not run |",
        "| 2 | not run | not run | 1 of 1 |",
        "",
        "* 1, b: found: its kernel is missing.",
    ]
    del reasons[1]["not_named"]
    with pytest.raises(SystemExit, match="say in `not_named` why b is found on 1"):
        make_block(read_scores(tmp_path / "scores.json"))


def test_values_of_a_release():
    row = {"defect": "d", "flags": "--a", "old": {"1": "x", "2": "y"}}
    assert listed.choose(row, "2") == {"name": "d", "defect": "d", "flags": "--a", "old": "y"}
