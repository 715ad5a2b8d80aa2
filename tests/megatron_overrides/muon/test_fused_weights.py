"""Muon's update of a fused weight, if asked, consists of those that each of its matrices would get alone."""

import pytest
import torch

from tests.oracles.experts.norms import why_not
from tests.oracles.muon.updates import HAS, SPLITS, assert_split, make_model

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def needs_muon():
    if reason := why_not("muon"):
        pytest.skip(reason)


@pytest.mark.parametrize("kind", HAS)
def test_each_matrix_is_orthogonalized_alone(needs_muon, kind):
    assert_split(make_model(kind), HAS[kind])


@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_main_copies_are_cut_as_their_weights(needs_muon, name):
    assert_split(make_model("dense"), SPLITS[:2], tolerance=1e-2, name=name, bf16=True)


@pytest.mark.parametrize("splits", [(), SPLITS[:1], SPLITS[1:2]], ids=str)
def test_only_what_is_asked_for_is_split(needs_muon, splits):
    assert_split(make_model("dense"), splits)
