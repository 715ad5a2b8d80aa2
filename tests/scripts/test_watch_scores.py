"""python -m scripts.watch_scores: ci/watch lists each defect once, faults can be planted, and findings are counted."""

import pytest
import torch
from megatron_mtp_patches.defects.catalog import known_defects, releases_with

from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.watch_scores import listed
from scripts.watch_scores.changes import change_tensor
from scripts.watch_scores.outcomes import describe, read_findings
from scripts.watch_scores.places import Piece
from scripts.watch_scores.table import Score, make_table, read_scores, write_scores

pytestmark = pytest.mark.forked("python")
KINDS = {"wrong numbers", "lost state", "hang"}
WITHOUT_TRAINER = {"0.16.1", "main"}
PLACES = {"weight", "main weight", "moment", "buffer", "gradient", "batch", "mark", "seed", "update"}
MOMENTS = {"model", "forward", "check", "update", "during update"}
CHANGES = {
    *("flip", "set", "swap", "exchange", "restore", "zero", "add", "sample", "replica", "skip", "value", "element"),
}


@pytest.fixture(scope="module")
def defects():
    return {defect.id: defect for defect in known_defects() if defect.kind in KINDS}


@pytest.fixture(scope="module")
def faults():
    return listed.read_faults()


def test_each_defect_is_in_one_place(defects):
    cases, not_seen = listed.read_defects()
    listed_ids = [case["defect"] for case in cases] + [name for row in not_seen for name in row["defects"]]
    assert sorted(listed_ids) == sorted(defects)
    assert all(row["reason"] and row.get("would", "norm") in listed.RELATIONS for row in not_seen)


def test_cases_are_of_releases_with_the_defect_and_a_trainer(defects):
    cases, _ = listed.read_defects()
    for case in cases:
        assert case["releases"] == [
            release for release in releases_with(defects[case["defect"]]) if release not in WITHOUT_TRAINER
        ], case["defect"]
        assert 1 <= case["ranks"] <= listed.MOST_RANKS and case["step"] > 0 and case["why"], case["defect"]
        assert case["relation"] in listed.RELATIONS, case["defect"]


def test_each_defect_declares_the_relation_that_sees_it():
    cases, not_seen = listed.read_defects()
    relations = {case["defect"]: case["relation"] for case in cases}
    relations |= {name: row["would"] for row in not_seen if "would" in row for name in row["defects"]}
    assert {one.id: one.seen_by for one in known_defects() if one.seen_by} == relations


def test_cases_have_the_ranks_and_flags_that_parity_knows():
    parity_runs = {}
    for case in read_toml(ROOT / "ci" / "parity" / "known.toml")["case"]:
        parity_runs.setdefault(case["defect"], []).append((case["ranks"], case["flags"]))
    cases, _ = listed.read_defects()
    for case in cases:
        runs = parity_runs.get(case["defect"])
        assert runs is None or (case["ranks"], case["flags"]) in runs, case["defect"]


def test_names_of_faults_and_layouts_are_unique_and_used(faults):
    parts = read_toml(listed.FOLDER / "faults.toml")
    names = [fault["name"] for fault in faults]
    layouts = [layout["name"] for layout in parts["layout"]]
    assert len(names) == len(set(names)) and len(layouts) == len(set(layouts))
    assert {fault["layout"]["name"] for fault in faults} == set(layouts)
    assert all(1 <= layout["ranks"] <= listed.MOST_RANKS for layout in parts["layout"])
    assert not {release for layout in parts["layout"] for release in layout["releases"]} & WITHOUT_TRAINER


def test_a_fault_is_caught_or_has_a_reason(faults):
    for fault in faults:
        caught = {"relation", "within"} & fault.keys()
        assert len(caught) == (0 if fault.get("not_seen") else 2), fault["name"]
        assert fault.get("relation", "norm") in listed.RELATIONS and fault.get("within", 1) > 0, fault["name"]


def test_a_script_can_plant_each_fault(faults):
    for fault in faults:
        name, where, rank = fault["name"], fault["where"], fault["rank"]
        assert where in PLACES and fault["at"] in MOMENTS and fault["step"] > 0, name
        assert fault["change"] and fault["change"].keys() <= CHANGES, name
        assert (where in ("seed", "update") or "sample" in fault["change"] or "replica" in fault["change"]) != (
            "tensor" in fault
        ), name
        assert ("state" in fault) == (where == "moment") and ("mark" in fault) == (where == "mark"), name
        ranks = [] if rank in ("all", "owner") else rank if isinstance(rank, list) else [rank]
        assert all(0 <= one < fault["layout"]["ranks"] for one in ranks), name


@pytest.fixture
def piece():
    """Elements 4 to 7 of a parameter."""
    return Piece(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16), 4)


@pytest.mark.parametrize(
    "change, values",
    [
        ({"flip": 15, "element": 6}, [1, 2, -3, 4]),
        ({"set": 9.0, "element": 4}, [9, 2, 3, 4]),
        ({"add": 1, "element": 7}, [1, 2, 3, 5]),
        ({"swap": [5, 7]}, [1, 4, 3, 2]),
        ({"exchange": "other"}, [5, 6, 7, 8]),
        ({"restore": True}, [0, 0, 0, 0]),
        ({"flip": 15, "element": 3}, None),
        ({"set": 9.0, "element": 8}, None),
        ({"swap": [3, 5]}, None),
    ],
)
def test_a_change_is_made_where_the_element_is(piece, change, values):
    other = Piece(torch.tensor([5.0, 6.0, 7.0, 8.0], dtype=torch.bfloat16), 4)
    unchanged = piece.values.tolist()
    assert change_tensor(piece, change, torch.zeros(4), {"other": other}.get) == (values is not None)
    assert piece.values.tolist() == (values or unchanged)
    assert "exchange" not in change or other.values.tolist() == unchanged


FAULT = {"relation": "copies", "step": 2, "within": 1, "where": "weight", "at": "forward"}


@pytest.mark.parametrize(
    "row, step, outcome",
    [
        (FAULT, 2, "caught"),
        (FAULT, 3, "caught otherwise"),
        (FAULT, 1, "false alarm"),
        (FAULT, None, "silent"),
        ({**FAULT, "relation": "norm"}, 2, "caught otherwise"),
        ({**FAULT, "within": 2}, 3, "caught"),
        ({**FAULT, "at": "update"}, 3, "caught"),
        ({**FAULT, "at": "during update"}, 3, "caught"),
        ({"relation": "copies", "step": 2}, 1, "caught otherwise"),
        ({"not_seen": "why", "step": 2, "where": "weight"}, 2, "caught otherwise"),
        ({"not_seen": "why", "step": 2, "where": "weight"}, None, "silent"),
        ({}, 1, "not clean"),
        ({}, None, "clean"),
    ],
)
def test_a_finding_of_its_relation_in_time_is_caught(row, step, outcome):
    line = f"watch, step {step}: copies differ: weight a: of the first, ranks 0 and 1"
    assert describe(row, read_findings([line, "watch: compares 3 tensors"])) == outcome


def test_what_moves_is_checked_after_the_update():
    findings = read_findings(["watch, step 2: a weight does not train: a: it has a gradient"])
    assert describe({**FAULT, "relation": "moves", "at": "during update"}, findings) == "caught"


def test_scores_of_a_list_stay_and_other_outcomes_are_named(tmp_path):
    file = tmp_path / "scores.json"
    old = [Score("faults", "0.18.2", name, "silent", "caught", [], [], "", 1) for name in "ab"]
    write_scores(old, file)
    write_scores([*read_scores(file), old[0]._replace(outcome="caught"), old[0]._replace(list="clean")], file)
    scores = read_scores(file)
    assert [(one.list, one.name, one.outcome) for one in scores] == [
        ("clean", "a", "silent"), ("faults", "a", "caught"), ("faults", "b", "silent"),
    ]  # fmt: skip
    text = "\n".join(make_table(scores))
    assert "1 of 2" in text and "not run" in text and "0.18.2, faults, b: silent" in text and "faults, a" not in text
