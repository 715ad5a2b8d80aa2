"""Losses for acceptance on the last stage of a pipeline, interleaved too, are those of whole logits."""

import pytest
import torch

from .test_frozen_main_model import LAYOUTS, layout, make  # noqa: F401

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-for-acceptance"), pytest.mark.ranks(2)]

IN_PIPELINES = ("PP2", "PP2, tied", "PP2, interleaved")


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in IN_PIPELINES], indirect=True, ids=IN_PIPELINES)
@pytest.mark.parametrize("is_detached", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("loss_type", ["tv", "e2e_tv"])
def test_the_logged_losses_are_those_of_whole_logits(make, loss_type, is_detached):  # noqa: F811
    from whole_logits import expected_losses, whole_logits

    microbatches = whole_logits(make(mtp_detach_heads=is_detached))
    training = make(mtp_detach_heads=is_detached, mtp_loss_type=loss_type)
    training.step(0)
    if microbatches:
        losses = torch.tensor([expected_losses(logits, loss_type) for logits in microbatches]).sum(0)
        assert training.losses == [pytest.approx(losses.tolist(), rel=1e-5)]
    else:
        assert not training.losses
