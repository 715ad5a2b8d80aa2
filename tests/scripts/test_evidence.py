"""The tables that tests write: what one run changes in the record, and that the pages say what the records say."""

import json
from pathlib import Path

import pytest

from scripts import study
from scripts.evidence import TABLES
from tests.tables import merge

pytestmark = pytest.mark.forked("python")
CI = Path(__file__).resolve().parents[2] / "ci"
OLD, NEW = {"megatron-core": "0.18.2", "torch": "1"}, {"megatron-core": "0.19.2", "torch": "1"}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_what_the_record_says(name):
    table = TABLES[name].make(json.loads((CI / name / "cpu.json").read_text(encoding="utf-8")))
    assert study.page(table.title, [table]) == (CI / name / "cpu.md").read_text(encoding="utf-8")


def test_megatrons_with_the_same_numbers_share_a_column():
    columns = merge(merge([], OLD, {"a": 1}), NEW, {"a": 1})
    assert columns == [{"megatrons": [OLD, NEW], "rows": {"a": 1}}]


def test_a_run_replaces_the_column_of_its_megatron_alone():
    columns = merge([{"megatrons": [OLD, NEW], "rows": {"a": 1}}], {**OLD, "torch": "2"}, {"a": 2})
    assert columns == [
        {"megatrons": [{**OLD, "torch": "2"}], "rows": {"a": 2}},
        {"megatrons": [NEW], "rows": {"a": 1}},
    ]
    assert merge(columns, OLD, {"a": 1}) == [{"megatrons": [OLD, NEW], "rows": {"a": 1}}]
