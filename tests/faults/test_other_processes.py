"""Forked and spawned workers, and configurations that are sent to them."""

from __future__ import annotations

SCENARIO = "patched"


def test_configurations_survive_pickle_deepcopy_and_replace(found):
    assert found["copies"] == dict.fromkeys(("pickle", "deepcopy", "replace"), [True, True])
    assert min(found["settings"]) > 10


def test_a_forked_worker_is_patched(found):
    for item in found["fork"]:
        assert item == {
            "imported": True,
            "step": "megatron_overrides",
            "values": [True, 0.5],
            "fields": [True, True],
            "refused": "",
        }


def test_a_spawned_worker_that_does_not_import_the_patches_is_not_patched_and_reads_the_configuration(found):
    """The values come along as plain attributes; the class there knows no such fields, and says so if it is asked."""
    item = found["spawn"][0]
    assert (item["imported"], item["step"], item["fields"]) == (False, "megatron", [False, False])
    assert item["values"] == [True, 0.5]
    assert "unexpected keyword argument 'min_clip_coefficient'" in item["refused"]


def test_a_spawned_worker_that_imports_the_patches_is_patched(found):
    item = found["spawn"][1]
    assert (item["imported"], item["step"], item["fields"]) == (True, "megatron_overrides", [True, True])
    assert (item["values"], item["refused"]) == ([True, 0.5], "")
