"""Arguments of `megatron sft` that reach nothing are refused before the model is made, with what was meant."""

import pytest

pytestmark = pytest.mark.forked("torch")


def test_a_misspelt_argument_and_one_for_other_trainers(megatron):
    arguments = ["--mtp_detatch_heads", "true", "--mtp_loss_scaling_schedule=0:0.3", "--not_ours", "1"]
    arguments += ["--mtp_num_layers", "0", "--mtp_clip_grad", "0.1"]
    output = megatron("sft", "sft", "idle", 1, *arguments, refused=True)
    assert "ValueError: mtp_detatch_heads: did you mean mtp_detach_heads?\n" in output
    reason = "whose trainer and models do not read it"
    assert f"mtp_loss_scaling_schedule does not act in ms-swift, {reason}: take it out\n" in output
    assert "mtp_clip_grad: no effect, because mtp_num_layers is not set, so the model has no MTP heads\n" in output


def test_a_value_that_its_parser_refuses_is_no_misspelt_name(megatron):
    output = megatron("sft", "sft", "idle", 1, "--mtp_clip_grad", "true", "--mtp_lrs", "1", refused=2)
    assert "--mtp_clip_grad/--mtp-clip-grad: invalid float value: 'true'\n" in output
    assert "did you mean --mtp-clip-grad?" not in output and "--mtp_lrs: did you mean --mtp-lr?\n" in output
