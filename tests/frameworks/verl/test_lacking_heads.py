"""A base without the heads that its config.json declares: verl could train such heads and not save them."""

import pytest

from .ppo import changed, parameters, update

pytestmark = [pytest.mark.forked("verl"), pytest.mark.guards("refuse-heads-that-verl-cannot-save")]

REFUSAL = r"lacking lacks weights of the MTP heads.*mtp\.layers\.0.*verl saves.*add-heads-to-a-hugging-face-model"


@pytest.mark.parametrize("settings", [{}, {"mtp_init": "last-layer"}])
def test_heads_that_would_train_and_be_lost_are_refused(make_worker, lacking, settings):
    with pytest.raises(ValueError, match=REFUSAL):
        make_worker(settings, path=lacking)


def test_heads_without_labels_that_would_train_and_be_lost_are_refused(make_worker, lacking_hybrid_model):
    with pytest.raises(ValueError, match="lacks weights of the MTP heads"):
        make_worker(mtp={"enable": True}, path=lacking_hybrid_model)


@pytest.mark.parametrize(
    "settings, mtp",
    [({}, {}), ({}, {"enable": True}), ({"disable_mtp_loss": True}, {"enable": True})],
    ids=["no heads", "heads that do not train", "heads that do not run"],
)
def test_the_main_model_trains_without_them(make_worker, make_batch, lacking, settings, mtp):
    worker = make_worker(settings, mtp=mtp, path=lacking)
    before = parameters(worker)
    update(worker, make_batch())
    assert changed(worker, before) == {"decoder", "embedding", "output_layer"}


def test_a_reference_model_needs_no_heads_of_its_own(make_worker, lacking):
    make_worker(mtp={"enable": True, "enable_train": True}, path=lacking, forward_only=True)
