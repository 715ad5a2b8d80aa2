"""A rank that dies or stops in mid-step: the others end with an error in time, and no checkpoint is damaged."""

from __future__ import annotations

import re

import pytest

SCENARIO = "killed_ranks"
WAYS = ["killed before the norms", "killed in the update", "stopped before the norms"]


@pytest.mark.parametrize("way", WAYS)
def test_the_survivor_ends_within_the_timeout_and_names_the_connection(found, way):
    pair = found["broken"][way]
    assert not pair["hung"] and "failed" not in pair["rank 0"], pair
    assert re.search(r"(?i)gloo|connection|timed out|peer", pair["rank 0"]["error"]), pair["rank 0"]
    assert pair["rank 0"]["waited"] < found["timeout"] + 10


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]])
def test_a_step_whose_norms_were_not_reduced_has_updated_nothing(found, way):
    rank = found["broken"][way]["rank 0"]
    assert rank["untouched"] is True
    assert {"get_grad_norm", "_reduce", "all_reduce"} <= set(rank["where"]), "it waited for the norms"


@pytest.mark.parametrize("way", WAYS)
def test_the_checkpoint_is_the_one_that_was_saved(found, way):
    pair = found["broken"][way]
    assert pair["checkpoint"] == pair["rank 0"]["saved"] and len(pair["checkpoint"]) == 5


def test_a_run_from_the_checkpoint_is_the_run_that_was_never_broken(found):
    straight, resumed = found["straight"]["rank 0"], found["resumed"]["rank 0"]
    assert straight["norms"].keys() == {"1", "2", "3", "4"}
    assert resumed["norms"] == {step: norm for step, norm in straight["norms"].items() if int(step) > 2}
    assert resumed["weights"] == straight["weights"]
