"""ci/watch: each known defect that a watch might see is listed once, and a script can plant each fault."""

import pytest
from megatron_mtp_patches.defects.catalog import known_defects, releases_with

from scripts import watch_lists
from scripts.common.toml import read_toml

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
    return watch_lists.read_faults()


def test_each_defect_is_in_one_place(defects):
    cases, not_seen = watch_lists.read_defects()
    listed = [case["defect"] for case in cases] + [name for row in not_seen for name in row["defects"]]
    assert sorted(listed) == sorted(defects)
    assert all(row["reason"] and row.get("would", "norm") in watch_lists.RELATIONS for row in not_seen)


def test_cases_are_of_releases_with_the_defect_and_a_trainer(defects):
    cases, _ = watch_lists.read_defects()
    for case in cases:
        assert case["releases"] == [
            release for release in releases_with(defects[case["defect"]]) if release not in WITHOUT_TRAINER
        ], case["defect"]
        assert 1 <= case["ranks"] <= watch_lists.MOST_RANKS and case["step"] > 0 and case["why"], case["defect"]
        assert case["relation"] in watch_lists.RELATIONS, case["defect"]


def test_cases_have_the_ranks_and_flags_that_parity_knows():
    known = {}
    for case in read_toml(watch_lists.ROOT / "ci" / "parity" / "known.toml")["case"]:
        known.setdefault(case["defect"], []).append((case["ranks"], case["flags"]))
    cases, _ = watch_lists.read_defects()
    for case in cases:
        runs = known.get(case["defect"])
        assert runs is None or (case["ranks"], case["flags"]) in runs, case["defect"]


def test_names_of_faults_and_layouts_are_unique_and_used(faults):
    parts = read_toml(watch_lists.FOLDER / "faults.toml")
    names = [fault["name"] for fault in faults]
    layouts = [layout["name"] for layout in parts["layout"]]
    assert len(names) == len(set(names)) and len(layouts) == len(set(layouts))
    assert {fault["layout"]["name"] for fault in faults} == set(layouts)
    assert all(1 <= layout["ranks"] <= watch_lists.MOST_RANKS for layout in parts["layout"])
    assert not {release for layout in parts["layout"] for release in layout["releases"]} & WITHOUT_TRAINER


def test_a_fault_is_caught_or_has_a_reason(faults):
    for fault in faults:
        caught = {"relation", "within"} & fault.keys()
        assert len(caught) == (0 if fault.get("not_seen") else 2), fault["name"]
        assert fault.get("relation", "norm") in watch_lists.RELATIONS and fault.get("within", 1) > 0, fault["name"]


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
