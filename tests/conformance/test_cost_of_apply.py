"""`apply()`, which every rank calls, opens each of Megatron's sources once."""

from __future__ import annotations

import sys
from collections import Counter

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.engine import source
from megatron_mtp_patches.engine.source import find_file
from megatron_mtp_patches.megatron_engine import ENGINE

pytestmark = pytest.mark.forked("megatron")


@pytest.fixture
def opened():
    """How often each of Megatron's sources was opened, as of now. The process that this is a fork of has read them."""
    source._answer.cache_clear()
    source._parse.cache_clear()
    sources = {str(find_file(module)): module for module in ENGINE.modules if find_file(module)}
    counts = Counter()

    def hear(event, arguments):
        if event == "open" and str(arguments[0]) in sources:
            counts[sources[str(arguments[0])]] += 1

    sys.addaudithook(hear)  # for the life of this fork
    yield counts
    megatron_mtp_patches.revert()


def test_each_source_is_read_once(opened):
    """Few syntax trees are kept, so the engine asks all its questions about one source together."""
    megatron_mtp_patches.apply()
    assert "applied" in {report.state for report in megatron_mtp_patches.status()}
    megatron_mtp_patches.record()
    before = Counter(opened)
    assert set(before.values()) == {1} and len(before) > 10
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply()
    assert opened == before
