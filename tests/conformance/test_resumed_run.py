"""What a run says when it goes on from a checkpoint that was saved with other patches or settings."""

import pytest
from megatron_mtp_patches.run_record.provenance import describe_differences

pytestmark = pytest.mark.forked("python")

RECORD = "0.3.0 floor-clip-coefficient=applied detach-mtp-heads=native sources=1a2b"


def describe(saved, present):
    return describe_differences({"megatron_mtp_patches": RECORD, **saved}, {"megatron_mtp_patches": RECORD, **present})


def test_the_same_patches_and_settings_are_not_mentioned():
    assert describe({"mtp_clip_grad": 0.05}, {"mtp_clip_grad": 0.05}) == ""
    assert describe({}, {"mtp_detach_heads": False, "lr": 1.0}) == ""  # a default; and a flag of Megatron's


def test_a_setting_that_differs_is_named_with_both_values():
    text = describe({"mtp_detach_heads": True}, {"mtp_clip_grad": 0.05})
    assert "--mtp-detach-heads was True and is False" in text and "--mtp-clip-grad was None and is 0.05" in text


@pytest.mark.parametrize(("word", "is_now"), [("left out now", True), ("left out then", False)])
def test_a_patch_that_one_of_the_runs_leaves_out_is_named(word, is_now):
    other = RECORD.replace("coefficient=applied", "coefficient=disabled").replace("native", "applied")
    before, now = (RECORD, other) if is_now else (other, RECORD)
    text = describe({"megatron_mtp_patches": before}, {"megatron_mtp_patches": now})
    assert text.endswith(f"other patches or settings: {word}: floor-clip-coefficient")


def test_a_checkpoint_without_the_patches_is_recognized():
    assert "was saved without megatron_mtp_patches" in describe_differences({}, {"megatron_mtp_patches": RECORD})
