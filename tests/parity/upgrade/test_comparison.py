"""What changes between two readings of a run."""

import pytest
from megatron_mtp_patches.parity.upgrade.comparison import Change, compare
from megatron_mtp_patches.parity.upgrade.reading import Reading

pytestmark = pytest.mark.forked("python")


def _read(findings=(), unknown=(), settings=(), unused=(), patches=()):
    return Reading(
        megatron="a Megatron",
        transformer_engine="none",
        world_size=1,
        findings=[{"id": one, "patch": f"remove-{one}"} for one in findings],
        unknown=list(unknown),
        settings={name: (value, "model") for name, value in dict(settings).items()},
        unused=list(unused),
        patches=dict(patches),
    )


def test_defects_go_come_and_stay():
    comparison = compare(_read(["A", "B"]), _read(["B", "C"]))
    names = [[one["id"] for one in part] for part in (comparison.gone, comparison.new, comparison.shared)]
    assert names == [["A"], ["C"], ["B"]]


def test_only_flags_that_the_older_one_knows_are_unknown():
    assert compare(_read(unknown=["--of-the-script"]), _read(unknown=["--of-the-script", "--gone"])).unknown == [
        "--gone"
    ]


def test_settings_change_come_and_go():
    comparison = compare(
        _read(settings={"same": "1", "other": "1", "gone": "True", "gone_and_off": "False"}),
        _read(settings={"same": "1", "other": "2", "new": "0.5", "new_and_off": "None"}),
    )
    assert comparison.changed == [Change("other", "model", "1", "2")]
    assert comparison.added == [Change("new", "model", "", "0.5"), Change("new_and_off", "model", "", "None")]
    assert [one.name for one in comparison.added + comparison.dropped if one.is_off] == ["new_and_off", "gone_and_off"]
    assert not Change("switched", "model", "True", "False").is_off


def test_a_setting_is_used_if_one_of_the_two_uses_its_feature():
    before = _read(settings={"a": "1", "b": "1", "c": "1", "gone": "1"}, unused=["a", "b", "gone"])
    after = _read(settings={"a": "2", "b": "2", "c": "2", "new": "1"}, unused=["a", "c", "new"])
    comparison = compare(before, after)
    is_used = {one.name: one.is_used for one in comparison.changed + comparison.added + comparison.dropped}
    assert is_used == {"a": False, "b": True, "c": True, "new": False, "gone": False}


def test_a_patch_is_superfluous_that_becomes_native():
    before = _read(patches={"a": "applied", "b": "native", "c": "applied", "d": "repaired"})
    after = _read(patches={"a": "native", "b": "native", "c": "repaired", "d": "native"})
    assert compare(before, after).superfluous == ["a", "d"]
