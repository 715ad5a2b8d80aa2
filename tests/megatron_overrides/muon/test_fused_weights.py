"""Muon's update of a fused weight, if asked, consists of those that each of its matrices would get alone."""

import pytest
import torch

from tests.oracles.experts.norms import why_not
from tests.oracles.muon.updates import HAS, SPLITS, by_hand, give_gradients, make_model, make_muon, updates, weights_of

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def needs_muon():
    if reason := why_not("muon"):
        pytest.skip(reason)


def check(net, splits, tolerance=1e-4, **settings):
    optimizer, model = make_muon(net, **dict.fromkeys(splits, True), **settings)
    gradients = give_gradients(model)
    found = updates(optimizer, model)
    assert len(found) > 1
    for name, weight in weights_of(model).items():
        right = by_hand(name, weight, gradients[name], splits)
        assert (found[name] - right).norm() < tolerance * right.norm(), name


@pytest.mark.parametrize("kind", HAS)
def test_each_matrix_is_orthogonalized_alone(needs_muon, kind):
    check(make_model(kind), HAS[kind])


@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_main_copies_are_cut_as_their_weights(needs_muon, name):
    check(make_model("dense"), SPLITS[:2], tolerance=1e-2, name=name, bf16=True)


@pytest.mark.parametrize("splits", [(), SPLITS[:1], SPLITS[1:2]], ids=str)
def test_only_what_is_asked_for_is_split(needs_muon, splits):
    check(make_model("dense"), splits)
