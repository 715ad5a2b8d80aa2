"""A patch that fails half-way, at each of its edits: Megatron is left as it was, and the other patches apply."""

from __future__ import annotations

SCENARIO = "unpatched"


def test_wherever_a_patch_fails_megatron_is_left_as_it_was(found):
    assert {name: outcome["wrong"] for name, outcome in found["alone"].items() if outcome["wrong"]} == {}
    assert sum(outcome["positions"] for outcome in found["alone"].values()) > 80, "hardly anything was tried"


def test_the_other_patches_apply_and_the_refused_one_is_named(found):
    for name, outcome in found["among others"].items():
        assert (outcome["state"], outcome["wrong"]) == ("refused", []), name
        assert len(outcome["warned"]) == 1, name
        assert f"{name} is refused: " in outcome["warned"][0] and outcome["target"] in outcome["warned"][0]


def test_an_error_names_the_patch_and_leaves_nothing_applied(found):
    for name, outcome in found["among others"].items():
        assert outcome["raised"].startswith(f"{name} is refused: ") and outcome["target"] in outcome["raised"]
        assert outcome["left"] == [], name
