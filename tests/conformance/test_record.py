"""The line that a run begins with, the record behind it, and what a resumed run says of other patches or settings."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.run_record.provenance import describe_differences, summarize

pytestmark = pytest.mark.forked("python")


@pytest.mark.parametrize(
    ("states", "line"),
    [
        ("a=disabled b=applied c=applied d=pending", "1 pending, 2 applied, 1 disabled (a)"),
        ("a=refused b=repaired c=repaired", "2 repaired, 1 refused (a)"),
        ("a=disabled b=disabled c=applied", "1 applied (c), 2 disabled"),
    ],
)
def test_states_are_counted_and_what_the_user_or_megatron_left_out_is_named(states, line):
    assert summarize(f"0.2.0 {states} sources=1a2b") == f"0.2.0: {line}; sources=1a2b"


def test_a_profile_is_said_and_what_it_leaves_out_is_not():
    assert summarize("0.2.0 profile=repairs a=disabled b=applied c=applied sources=1a2b") == (
        "0.2.0 profile=repairs: 2 applied, 1 disabled; sources=1a2b"
    )


@pytest.mark.parametrize("choice", ["all", "repairs", "none"])
def test_the_line_is_short_whatever_the_catalog_has(choice):
    megatron_mtp_patches.apply(choice, on_drift="skip")
    record = megatron_mtp_patches.record()
    assert len(summarize(record)) < 120 < len(record) and all(f" {patch.id}=" in record for patch in CATALOG)


# -- a run that goes on from a checkpoint ----------------------------------------------------------------------------

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
