"""Muon's update of a fused weight, if asked, consists of those that each of its matrices would get alone."""

import copy

import pytest
import torch

from tests.trainings.muon import (
    HAS,
    SPLITS,
    assert_split,
    give_gradients,
    make_model,
    make_muon,
    needs_muon,
    updates,
)

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("split-fused-weights-for-muon"), needs_muon]

pytest.importorskip("transformer_engine", reason="grouped experts and GatedDeltaNet are TransformerEngine's")


@pytest.mark.parametrize("kind", HAS)
def test_each_matrix_is_orthogonalized_alone(kind):
    assert_split(make_model(kind), HAS[kind])


@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_main_copies_are_cut_as_their_weights(name):
    assert_split(make_model("dense"), SPLITS[:2], tolerance=1e-2, name=name, bf16=True)


@pytest.mark.parametrize("splits", [(), SPLITS[:1], SPLITS[1:2]], ids=str)
def test_only_what_is_asked_for_is_split(splits):
    assert_split(make_model("dense"), splits)


def test_a_run_goes_on_unsplit_and_back():
    """The state of a split run is that of one that is not, whose next step is as if it had never been split."""
    states, taken = {}, {}
    for splits in ((), SPLITS[:2]):
        optimizer, model = make_muon(make_model("dense"), **dict.fromkeys(splits, True))
        give_gradients(model, seed=4)
        optimizer.step()
        states[splits] = copy.deepcopy(optimizer.state_dict())
        give_gradients(model)
        taken[splits] = updates(optimizer, model)
    for splits, others in (((), SPLITS[:2]), (SPLITS[:2], ())):
        optimizer, model = make_muon(make_model("dense"), **dict.fromkeys(splits, True))
        optimizer.load_state_dict(states[others])
        give_gradients(model)
        resumed = updates(optimizer, model)
        for name, right in taken[splits].items():
            torch.testing.assert_close(resumed[name], right, rtol=1e-4, atol=1e-5, msg=name)
