"""The fields of TransformerConfig that the patches add, as docs/testing.md counts them."""

import dataclasses
import re
from pathlib import Path

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import AddField
from megatron_mtp_patches.megatrons.installed import find_releases
from megatron_mtp_patches.megatrons.known import REFERENCE

pytestmark = pytest.mark.forked("patched")

OF_MEGATRON = [patch for patch in CATALOG if not patch.package]
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_upstream_s_golden_test_of_the_configuration_meets_as_many_fields_as_the_page_says():
    sentence = re.search(r"The patches add (.*?), and\s+remove\s+none", PAGE.read_text(encoding="utf-8"), re.S)[1]
    counts = [part.split(" on ") for part in re.split(r",\s+(?=\d+ on)", sentence)]
    (expected,) = (int(count) for count, releases in counts if find_releases() & set(re.split(r"[\s,]+", releases)))
    added = [field.name for field in dataclasses.fields(TransformerConfig) if field.metadata.get("added_in_place")]
    assert len(added) == expected


def test_a_field_has_the_default_that_is_declared_and_is_upstreams_where_a_release_has_it(release):
    installed = {field.name: field for one in (OptimizerConfig, TransformerConfig) for field in dataclasses.fields(one)}
    edits = {edit.field: edit for patch in OF_MEGATRON for edit in patch.edits if isinstance(edit, AddField)}
    native = {name for name in edits if not installed[name].metadata.get("added_in_place")}
    upstreams = {name for name, edit in edits.items() if edit.is_upstream}
    assert native == upstreams if release == REFERENCE else native < upstreams
    assert {name: installed[name].default for name in edits} == {name: edit.default for name, edit in edits.items()}
