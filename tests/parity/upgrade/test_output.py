"""What `upgrade` prints, and what it advises where a Megatron refuses the flags."""

import pytest
from megatron_mtp_patches.cli import upgrade
from megatron_mtp_patches.cli.upgrade_output import show_comparison, show_numbers
from megatron_mtp_patches.engine import UsageError
from megatron_mtp_patches.parity.comparison import Deviation
from megatron_mtp_patches.parity.upgrade.comparison import Change, Comparison
from megatron_mtp_patches.parity.upgrade.numbers import CutDefect, Functions, compare_numbers
from megatron_mtp_patches.parity.upgrade.reading import Reading
from megatron_mtp_patches.parity.upgrade.small_run import SmallRunNumbers

pytestmark = pytest.mark.forked("python")
READINGS = [Reading("a Megatron", "none", 1, [], [], {}, [], {})] * 2
NOTHING = Comparison(gone=[], new=[], shared=[], unknown=[], changed=[], added=[], dropped=[], superfluous=[])


@pytest.fixture
def lines():
    return []


@pytest.fixture
def show(lines):
    return lambda text, style=None: lines.append(text)


def test_settings_that_do_nothing_are_counted(show, lines):
    added = [
        Change("new", "model", "", "2"),
        Change("off", "model", "", "None"),
        Change("rl_new", "trainer", "", "1", is_used=False),
    ]
    changed = [Change("lr", "optimizer", "1", "2"), Change("rl_lag", "trainer", "1", "2", is_used=False)]
    show_comparison(show, READINGS, NOTHING._replace(added=added, changed=changed))
    values = "\nSettings of this run with another value: 1, beside 1 that belong to features that it does not use"
    news = "\nNew settings that are on or have a value: 1, beside 1 that are off and 1 that belong to features that it "
    assert lines[lines.index(values) + 1 :][:3] == [
        "* lr (optimizer): 1 -> 2",
        f"{news}does not use",
        "* model: new 2",
    ]
    assert "\nSettings that are gone and were on or had a value: 0" in lines


def test_superfluous_patches_that_remove_a_defect_come_first(show, lines):
    finding = dict.fromkeys(("id", "text", "kind", "evidence", "only_if", "releases", "remedy"), "")
    gone = [{**finding, "severity": 1, "patch": "b", "is_removed": True}]
    show_comparison(show, READINGS, NOTHING._replace(gone=gone, superfluous=["a", "b", "c"]))
    assert lines[-2:] == ["* b (it removes a defect of this run)", "* without a defect of this run: a, c"]


def _numbers(**changes):
    numbers = SmallRunNumbers(records={}, refusals={}, functions={}, defects={}, draw=0, tolerance=None)
    return numbers._replace(**changes)


def test_defects_of_a_cut_that_one_of_the_two_has_are_named(show, lines):
    before = _numbers(refusals={"CP2": "TypeError", "EP2": "KeyError"}, defects={"CP2": {"A": "ends", "B": "stays"}})
    after = _numbers(refusals={"EP2": "KeyError"}, records={"CP2": []}, defects={"CP2": {"B": "stays", "C": "drifts"}})
    cp, ep = compare_numbers(before, after)
    assert cp.defects == [CutDefect("A", "ends", "older"), CutDefect("C", "drifts", "newer")] and not ep.defects
    differs = cp._replace(name="TP2", refusals=("", ""), deviations=[Deviation("log", "loss", 1, 0.5)], defects=[])
    functions = Functions(changed=["megatron.a:f", "megatron.a:g", "megatron.b:f"], new=[], gone=[])
    show_numbers(show, [cp, ep, differs], functions)
    assert lines[1:5] == [
        "CP2: does not train: from: TypeError",
        "    known, in the older Megatron alone: A: ends",
        "    known, in the newer Megatron alone: C: drifts",
        "EP2: does not train: from: KeyError; to: KeyError",
    ]
    assert lines.count("    no known defect of this cut is in one of the two Megatrons alone") == 1  # of TP2
    assert lines[-2:] == ["* megatron.a: f, g", "* megatron.b: f"]


@pytest.mark.parametrize("refusing, advice", [("old", "give the flags that it had there"), ("new", "until both")])
def test_refused_flags_come_with_advice(refusing, advice, monkeypatch):
    def read_in(tree, flags, world_size):
        if tree == refusing:
            raise UsageError("it refuses them")

    monkeypatch.setattr(upgrade, "read_in", read_in)
    options = upgrade.UpgradeOptions("old", "new", (), None, False, "", "fp32", 2, False)
    with pytest.raises(UsageError, match=rf"it refuses them\n.*{advice}"):
        for tree, text in zip(("old", "new"), upgrade.ADVICE, strict=True):
            upgrade._read(tree, options, text)
