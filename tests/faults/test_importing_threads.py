"""Threads that import Megatron at once get it patched once, and do not wait for each other for ever."""

from __future__ import annotations

SCENARIO = "patched"


def test_no_thread_hangs(found):
    assert found["modules"] >= 8 and found["hanging"] == 0


def test_no_patch_fails_in_a_thread(found):
    """Megatron imports itself in circles, which Python may cut short where threads meet; that is not ours."""
    assert [error for error in found["errors"] if "PatchError" in error or "megatron_mtp" in error] == []


def test_each_edit_is_in_force_once(found):
    for name, patch in found["found"].items():
        assert patch["state"] in ("applied", "repaired", "native", "pending", None), name
        if patch["state"] in ("applied", "repaired", None):
            counts = set(patch["counts"].values())
            assert 1 in counts and counts <= {1, None, "native"}, (name, patch["counts"])
