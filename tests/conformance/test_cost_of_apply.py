"""Every rank calls `apply()`: what its time stands for is how often it reads sources and scans modules."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.applied import ENGINE
from megatron_mtp_patches.engine import copies, source
from megatron_mtp_patches.engine.source import find_file

pytestmark = pytest.mark.forked("megatron")


class CountedModules:
    """sys.modules, and how often all of it was looked through."""

    def __init__(self) -> None:
        self.scans = 0

    def items(self):
        self.scans += 1
        return sys.modules.items()


@pytest.fixture
def modules(monkeypatch):
    counted = CountedModules()
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=counted))
    yield counted
    megatron_mtp_patches.revert()


@pytest.fixture(scope="module")
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
    return counts


def test_nothing_is_read_where_every_patch_is_disabled(modules, opened):
    """First in this file: afterwards the sources are known."""
    megatron_mtp_patches.apply("none")
    megatron_mtp_patches.record()
    assert {report.state for report in megatron_mtp_patches.status()} == {"disabled"}
    assert opened == {}


def test_each_source_is_read_once_and_modules_are_scanned_once(modules, opened):
    megatron_mtp_patches.apply()
    assert modules.scans == 1
    states = {report.state for report in megatron_mtp_patches.status()}
    megatron_mtp_patches.record()
    assert "applied" in states
    before = Counter(opened)
    assert set(before.values()) == {1} and len(before) > 10
    megatron_mtp_patches.revert()
    assert modules.scans == 2
    megatron_mtp_patches.apply()
    assert opened == before
