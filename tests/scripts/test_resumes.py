"""What is counted of the resumes of a layout, and the cells of the table."""

from types import SimpleNamespace

import pytest

from scripts import resumes
from scripts.common.toml import read_toml

pytestmark = pytest.mark.forked("python")
ONE, TWO = SimpleNamespace(name="one rank"), SimpleNamespace(name="TP2")
KNOWN = [SimpleNamespace(id="ML-1")]


def try_one(saved, loaded, refusal="", deviations=(), dependences=(), explanations=()):
    return SimpleNamespace(**locals())


def show(*tried):
    """The first row of the table and the lines below it, where a release has this in its first layout and format."""
    layouts = read_toml(resumes.LAYOUTS)
    cells = {layouts["formats"][0]: resumes.summarize(tried)}
    name = layouts["layout"][0]["name"]
    lines = resumes.make_table({"0.2.0": {name: cells}, "0.1.0": {name: cells}}).splitlines()
    return lines[2].split(" | ")[1], [line for line in lines if "`" in line]


def test_resumes_are_counted_by_what_came_of_them():
    refused = "RuntimeError: `size` 2"
    tried = [
        try_one(ONE, ONE),
        try_one(TWO, TWO, deviations=["weight a, step 1"], explanations=KNOWN),
        try_one(ONE, TWO, dependences=["blockwise"]),
        try_one(TWO, ONE, refusal=refused),
    ]
    counted = "1 equal, 1 as Megatron defines it, 1 differ (ML-1), 1 refused (1)"
    assert show(*tried) == (counted, ["1. `RuntimeError: 'size' N`"])
    assert show(tried[0]) == ("equal", [])
    assert show(tried[0], try_one(TWO, TWO, deviations=["weight a"]))[0] == "1 equal, 1 differ (unexplained)"


def test_where_one_rank_is_refused_no_other_is_tried():
    tried = iter([try_one(ONE, ONE, refusal="KeyError", explanations=KNOWN), try_one(TWO, TWO)])
    assert resumes.summarize(tried)["tried"] == 1 and len(list(tried)) == 1
