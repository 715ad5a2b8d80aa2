"""The line that a run begins with is short; the record behind it has the state of each patch."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.run_record.provenance import summarize

pytestmark = pytest.mark.forked("python")


@pytest.mark.parametrize(
    ("states", "line"),
    [
        ("a=applied b=native c=applied", "2 applied, 1 native"),
        ("a=disabled b=applied c=applied d=pending", "1 pending, 2 applied, 1 disabled (a)"),
        ("a=refused b=repaired c=repaired", "2 repaired, 1 refused (a)"),
        ("a=disabled b=disabled c=applied", "1 applied (c), 2 disabled"),
        ("a=disabled b=disabled", "2 disabled"),
        ("a=disabled b=disabled c=refused", "2 disabled, 1 refused (c)"),
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
