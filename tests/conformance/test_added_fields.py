"""The fields that the patches add to Megatron's configurations."""

import dataclasses

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.engine import AddField
from megatron_mtp_patches.megatrons.known import REFERENCE

pytestmark = pytest.mark.forked("patched")

OF_MEGATRON = [patch for patch in CATALOG if not patch.package]


def test_a_field_has_the_default_that_is_declared_and_is_upstreams_where_a_release_has_it(release):
    installed = {field.name: field for one in (OptimizerConfig, TransformerConfig) for field in dataclasses.fields(one)}
    edits = {edit.field: edit for patch in OF_MEGATRON for edit in patch.edits if isinstance(edit, AddField)}
    native = {name for name in edits if not installed[name].metadata.get("added_in_place")}
    upstreams = {name for name, edit in edits.items() if edit.is_upstream}
    assert native == upstreams if release == REFERENCE else native < upstreams
    assert {name: installed[name].default for name in edits} == {name: edit.default for name, edit in edits.items()}
