"""python -OO leaves out assertions and docstrings; the patches need neither."""

from __future__ import annotations

SCENARIO = "optimised"


def test_every_patch_is_in_force(found):
    assert found["docstrings"] is None, "this was no python -OO"
    assert {module.partition(".")[0] for module in found["failures"]} <= {"emerging_optimizers"}
    for name, patch in found["found"].items():
        assert patch["state"] in ("applied", "repaired", "native", "pending", None), name
        if patch["state"] in ("applied", "repaired"):
            counts = set(patch["counts"].values())
            assert 1 in counts and counts <= {1, None, "native"}, (name, patch["counts"])


def test_the_commands_do_without_the_docstrings(found):
    assert found["summaries"] == {name: name for name in found["summaries"]}
    code, text = found["explained"]
    assert code == 0 and next(iter(found["summaries"])) in text
    assert "status" in found["help"]
