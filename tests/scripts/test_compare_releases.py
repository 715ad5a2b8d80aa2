"""python -m scripts.compare_releases: what differs is found and named, whatever else is equal."""

import copy
import json
import math

import pytest

from scripts.compare_releases.__main__ import report
from scripts.compare_releases.differences import compare
from scripts.compare_releases.table import compare_all

pytestmark = pytest.mark.forked("python")
STEPS = [
    {"counts": {"updated": True, "zeros": 3}, "norms": {"main": 0.1, "mtp": 2.0}},
    {"counts": {"updated": False, "zeros": 0}, "norms": {"main": math.nan, "mtp": math.inf}},
]


@pytest.fixture
def make_record():
    """make_record(): of two ranks and one case."""

    def make(ranks=2):
        numbers = [{"steps": copy.deepcopy(STEPS), "parameters": [[0.5, -0.0]]} for _ in range(ranks)]
        return {
            "ranks": ranks,
            "torch": "2.15.0",
            "cases": {"optimizer/one": {"ranks": numbers, "cause": "", "cause of": []}},
        }

    return make


def differences(*records):
    return compare(*records)["optimizer/one"]


def test_equal_records(make_record):
    difference = differences(make_record(), make_record())
    assert str(difference) == "bitwise" and not difference.is_wrong


@pytest.mark.parametrize(
    "place, value, named",
    [
        (("steps", 0, "norms", "main"), math.nextafter(0.1, 1), "rank 1 steps 0 norms main: 0.1"),
        (("steps", 1, "norms", "main"), 1.0, "norms inf"),
        (("steps", 1, "norms", "mtp"), 1.0, "rank 1 steps 1 norms mtp: 1.0 instead of inf"),
        (("steps", 1, "counts", "updated"), True, "counts 1.0e+00"),
        (("parameters", 0, 1), 0.0, "rank 1 parameters 0 1: 0.0 instead of -0.0"),
        (("parameters", 0, 0), 0.75, "parameters 2.5e-01"),
    ],
)
def test_one_changed_number_is_named(make_record, place, value, named):
    other = make_record()
    part = other["cases"]["optimizer/one"]["ranks"][1]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    difference = differences(make_record(), other)
    assert (
        difference.is_wrong and difference.first.startswith("rank 1") and named in f"{difference.first}; {difference}"
    )


def test_a_step_or_a_case_too_few(make_record):
    shorter, other = make_record(), make_record()
    shorter["cases"]["optimizer/one"]["ranks"][0]["steps"].pop()
    other["cases"] = {}
    for record, named in (
        (shorter, "rank 0 steps 1 counts updated: nothing instead of False"),
        (other, "there is no such case"),
    ):
        difference = differences(make_record(), record)
        assert difference.is_wrong and difference.first == named


@pytest.mark.parametrize("of, wrong", [("mtp", False), ("main", True)])
def test_what_is_meant_to_differ_says_why_and_nothing_else_may(make_record, of, wrong):
    other = make_record()
    case = other["cases"]["optimizer/one"]
    case["ranks"][0]["steps"][0]["norms"]["mtp"] = 4.0
    case |= {"cause": "for a reason", "cause of": [of]}
    difference = differences(make_record(), other)
    assert (str(difference), difference.is_wrong) == ("norms 2.0e+00", wrong)
    assert difference.cause == ("" if wrong else "for a reason")


def test_each_case_has_its_reference_and_equal_rows_are_one(make_record, tmp_path, capsys):
    """Native 0.19.2 lacks a case, so that is held against 0.19.2 with the patches."""
    records = {}
    for ranks in (1, 2):
        for release, patched in (("0.18.2", True), ("0.19.2", True), ("0.19.2", False)):
            record = records[release, ranks, patched] = make_record(ranks)
            if patched:
                record["cases"]["optimizer/own"] = copy.deepcopy(record["cases"]["optimizer/one"])
    records["0.18.2", 2, True]["cases"]["optimizer/own"]["ranks"][1]["steps"][0]["norms"]["mtp"] = 2.5
    for release in ("0.18.2", "0.19.2"):
        records[release, 1, True]["cases"]["optimizer/one"] |= {"cause": "for a reason", "cause of": ["norms"]}
    records["0.18.2", 1, True]["cases"]["optimizer/one"]["ranks"][0]["steps"][0]["norms"]["mtp"] = 4.0
    releases = ["0.18.2", "0.19.2"]
    rows = [row for ranks in (1, 2) for row in compare_all(records, releases, ranks)]
    assert [row.is_wrong for row in rows] == [False, False, False, True]
    report(rows, dict.fromkeys(releases, "2.15.0"), "cpu", tmp_path)
    assert "optimizer/own, 0.18.2: rank 1 steps 0 norms mtp: 2.5 instead of 2.0" in capsys.readouterr().out
    assert [line for line in (tmp_path / "cpu.md").read_text().splitlines() if line.startswith("| optimizer")] == [
        "| optimizer/one | 1 | native | norms 2.0e+00 (1) | bitwise |",
        "| optimizer/one | 2 | native | bitwise | bitwise |",
        "| optimizer/own | 1 | patched | bitwise | reference |",
        "| optimizer/own | 2 | patched | norms 5.0e-01 | reference |",
    ]
    assert (tmp_path / "cpu.md").read_text().endswith("|\n\n(1) for a reason\n")
    written = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert written[-1] == {
        "case": "optimizer/own",
        "ranks": 2,
        "reference": "patched",
        "largest differences": {"0.18.2": {"norms": 0.5}},
    }
