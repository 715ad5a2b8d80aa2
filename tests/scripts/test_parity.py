"""scripts/parity.py's comparison: what differs it finds and names, whatever else is equal."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts"
STEPS = [
    {"counts": {"updated": True, "zeros": 3}, "norms": {"main": 0.1, "mtp": 2.0}},
    {"counts": {"updated": False, "zeros": 0}, "norms": {"main": math.nan, "mtp": math.inf}},
]


@pytest.fixture
def make_record():
    """make_record(): of two ranks and one case."""

    def make(ranks=2):
        of_ranks = [{"steps": copy.deepcopy(STEPS), "parameters": [[0.5, -0.0]]} for _ in range(ranks)]
        return {
            "ranks": ranks,
            "torch": "2.15.0",
            "cases": {"optimizer/one": {"of ranks": of_ranks, "cause": "", "cause of": []}},
        }

    return make


@pytest.fixture
def compare(tmp_path):
    """compare(expected, other): (exit code, what it printed)."""

    def run(*records):
        files = [tmp_path / f"{name}.json" for name in ("expected", "other")]
        for file, record in zip(files, records, strict=True):
            file.write_text(json.dumps(record))
        command = [sys.executable, str(FOLDER / "parity.py"), "compare", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "150"})
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "parity"))
    import runs

    return runs


def test_equal_records(compare, make_record):
    code, output = compare(make_record(), make_record())
    assert code == 0 and "bitwise" in output


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
def test_one_changed_number_is_named(compare, make_record, place, value, named):
    other = make_record()
    part = other["cases"]["optimizer/one"]["of ranks"][1]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    code, output = compare(make_record(), other)
    assert code == 1 and "optimizer/one, other: rank 1" in output and named in output


def test_a_step_or_a_case_too_few(compare, make_record):
    shorter, other = make_record(), make_record()
    shorter["cases"]["optimizer/one"]["of ranks"][0]["steps"].pop()
    other["cases"] = {}
    for record, named in (
        (shorter, "rank 0 steps 1 counts updated: nothing instead of False"),
        (other, "no such case"),
    ):
        code, output = compare(make_record(), record)
        assert code == 1 and named in output


@pytest.mark.parametrize("of, code", [("mtp", 0), ("main", 1)])
def test_what_is_meant_to_differ_says_why_and_nothing_else_may(compare, make_record, of, code):
    other = make_record()
    case = other["cases"]["optimizer/one"]
    case["of ranks"][0]["steps"][0]["norms"]["mtp"] = 4.0
    case |= {"cause": "for a reason", "cause of": [of]}
    found, output = compare(make_record(), other)
    assert found == code and "norms 2.0e+00" in output
    assert ("(1) for a reason" in output) is (code == 0)


def test_each_case_has_its_reference_and_equal_rows_are_one(runs, make_record, tmp_path):
    """Native 0.19.2 lacks a case, so that is held against 0.19.2 with the patches."""
    records = {}
    for ranks in (1, 2):
        for release, patched in (("0.18.2", True), ("0.19.2", True), ("0.19.2", False)):
            record = records[release, ranks, patched] = make_record(ranks)
            if patched:
                record["cases"]["optimizer/own"] = copy.deepcopy(record["cases"]["optimizer/one"])
    records["0.18.2", 2, True]["cases"]["optimizer/own"]["of ranks"][1]["steps"][0]["norms"]["mtp"] = 2.5
    releases = ["0.18.2", "0.19.2"]
    rows = [row for ranks in (1, 2) for row in runs.compare_all(records, releases, ranks)]
    runs.table.write(rows, releases, {"what": "differences", "device": "cpu"}, "title", tmp_path)
    assert [line for line in (tmp_path / "cpu.md").read_text().splitlines() if line.startswith("| optimizer")] == [
        "| optimizer/one | 1, 2 | native | bitwise | bitwise |",
        "| optimizer/own | 1 | patched | bitwise | reference |",
        "| optimizer/own | 2 | patched | norms 5.0e-01 | reference |",
    ]
    written = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert written[-1] == {
        "case": "optimizer/own",
        "ranks": 2,
        "reference": "patched",
        "largest differences": {"0.18.2": {"norms": 0.5}},
    }
