"""Losses for acceptance of a hybrid model's heads are those of whole logits."""

import pytest
import torch

from tests.oracles.losses.whole_logits import expected_losses, whole_logits

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("train-mtp-heads-for-acceptance")]


@pytest.mark.parametrize("is_detached", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("loss_type", ["tv", "e2e_tv"])
def test_the_logged_losses_are_those_of_whole_logits(train_hybrid, loss_type, is_detached):
    microbatches = whole_logits(train_hybrid(mtp_detach_heads=is_detached))
    training = train_hybrid(mtp_detach_heads=is_detached, mtp_loss_type=loss_type)
    training.step(0)
    losses = torch.tensor([expected_losses(logits, loss_type) for logits in microbatches]).sum(0)
    assert training.losses == [pytest.approx(losses.tolist(), rel=1e-5)]
