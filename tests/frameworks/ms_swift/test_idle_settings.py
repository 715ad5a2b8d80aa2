"""Arguments of `megatron sft` that reach nothing are refused before the model is made, with what was meant."""

import pytest

pytestmark = pytest.mark.forked("torch")


def test_a_misspelt_argument_and_one_for_other_trainers(megatron):
    arguments = ["--mtp_detatch_heads", "true", "--mtp_loss_scaling_schedule=0:0.3", "--not_ours", "1"]
    output = megatron("sft", "sft", "idle", 1, *arguments, refused=True)
    assert "ValueError: mtp_detatch_heads: did you mean mtp_detach_heads?\n" in output
    assert "mtp_loss_scaling_schedule does not act in this framework: take it out\n" in output
